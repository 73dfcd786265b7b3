"""Backwards read a snapshot of what their graph writes over: torch's compilers compute choices again, and would take
the new values. They do without cp_rewrite, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

from cp_rewrite.diagnose.check import difference
from cp_rewrite.passes.graph.nodes import written_memory
from cp_rewrite.passes.rewrite.inputs import take_snapshots

STEP = 0.7


@torch.compiler.nested_compile_region
def chosen(g: Tensor, bias: Tensor) -> Tensor:
    out = (g + bias > 0.5).float() * g * g
    bias.add_(STEP)
    return out


class Router(nn.Module):
    """Experts are chosen by a bias that the forward changes; `how`: when, and what is written."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 8))
        self.scale = nn.Parameter(torch.rand(4))
        self.register_buffer("bias", torch.zeros(4))
        self.bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        g = self.gate(x).sigmoid()
        if self.how == "region":
            return ((chosen(g, self.bias) * self.scale) @ self.experts * x).sum()
        with torch.no_grad():
            if self.how == "before":
                self.bias.add_(0.1)
            if self.how == "parameter":
                self.scale.mul_(0.5)
        mask = F.one_hot((g + self.bias).argmax(-1), 4).float() if self.how == "argmax" else (g + self.bias > 0.5)
        out = (mask * g * g * self.scale.sin().exp()) @ self.experts * x
        with torch.no_grad():
            if self.how == "view":
                self.bias[:2].add_(STEP)
                self.bias[1:].mul_(2)
            elif self.how in ("argmax", "after"):
                self.bias.add_(STEP)
        return out.sum()


def steps(router: Router, call: Any) -> list[Tensor]:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    found: list[Tensor] = []
    for _ in range(2):
        router.zero_grad()
        call(x).backward()
        found += [p.grad.clone() for p in router.parameters() if p.grad is not None]
    return [*found, router.bias.clone(), router.scale.detach().clone()]


def largest_error(how: str, compiler: str, with_snapshots: bool) -> float:
    """Against eager mode."""

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if with_snapshots:
            take_snapshots(gm, written_memory(gm))
        compile_inner: Any = lookup_backend(compiler)
        return compile_inner(gm, inputs)

    torch._dynamo.reset()
    router = Router(how)
    found = steps(router, torch.compile(router, backend=backend, fullgraph=True))
    plain = Router(how)
    return max(difference(a, b) for a, b in zip(found, steps(plain, plain), strict=True))


@pytest.mark.parametrize("how", ["argmax", "after", "before", "view", "parameter", "region"])
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_backward_reads_what_the_forward_did(how: str, compiler: str) -> None:
    assert largest_error(how, compiler, with_snapshots=True) < 1e-4


def test_torch_alone_reads_what_was_written_over() -> None:
    """Where this fails, torch has mended it, and `take_snapshots` may go for its version (docs/versions.md)."""
    assert largest_error("after", "aot_eager", with_snapshots=False) > 0.01


def test_nothing_is_copied_where_nothing_is_written_or_needs_gradients() -> None:
    gm = fx.symbolic_trace(lambda x: x.sin())
    for node in gm.graph.nodes:
        node.meta["example_value"] = torch.ones(3)
    before = gm.code
    take_snapshots(gm, written_memory(gm))
    assert gm.code == before
