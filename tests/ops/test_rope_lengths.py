"""RoPE whose frequencies hang on the longest position: what is traced in a batch's block is what eager calls do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cp_rewrite as cp
from cp_rewrite.ops.states import functions
from cp_rewrite.ops.states.functions import state_ops
from tests.helpers.models import build_model

LENGTHS = (15, 16, 17, 16, 23, 16, 15, 19, 3)
"""Below, at and above 16, in turns."""
MODELS = ("phi3_longrope", "llama_dynamic", "hunyuan_dynamic", "gemma3_dynamic", "phimoe_longrope")
QUICK, slow = ("phi3_longrope", "llama_dynamic"), pytest.mark.slow
KEPT = ("inv_freq", "max_seq_len_cached")


def rope_of(name: str) -> tuple[Any, tuple[str, ...]]:
    """A model's module of RoPE, and what its calls end with."""
    model: Any = build_model(name)
    return model.model.rotary_emb, ("full_attention",) if name.startswith("gemma3") else ()


def kept(module: nn.Module) -> dict[str, list[float]]:
    names = [name for name in {*dir(module), *module._buffers} if name.endswith(KEPT)]
    return {name: torch.as_tensor(getattr(module, name)).flatten().tolist() for name in names}


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=slow) for name in MODELS])
def test_a_graph_gives_and_keeps_what_eager_calls_do(name: str) -> None:
    """One graph takes all lengths; eager calls and calls outside of blocks go on from what it keeps."""
    plain, ends = rope_of(name)
    ours, x, graphs = copy.deepcopy(plain), torch.zeros(1, 1), list[Any]()

    def backend(gm: Any, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(ours, backend=backend, fullgraph=True, dynamic=True)
    with state_ops():
        pass  # the decorator's functions are replaced: the eager calls below are those of replaced ones, too
    for step, T in enumerate(LENGTHS):
        positions = torch.arange(T)[None]
        expected = plain(x, positions, *ends)
        if step in (4, 6):
            found = ours(x, positions, *ends)
        else:
            with state_ops():
                found = compiled(x, positions, *ends)
        assert all(torch.allclose(ours_, theirs, rtol=1e-6) for ours_, theirs in zip(found, expected, strict=True)), T
        theirs = kept(plain)
        assert {name: value for name, value in kept(ours).items() if name in theirs} == theirs, T
    assert len(graphs) == 1


@pytest.mark.parametrize("name", MODELS)
def test_all_updates_are_replaced(name: str) -> None:
    module, _ = rope_of(name)
    with state_ops():
        cells = functions._cells(type(module).forward)
    assert {cells[name].cell_contents.__module__ for name in functions._TRACED} == {functions.__name__}


def test_an_update_that_does_something_else_stays() -> None:
    """A library whose branches are others is left alone."""

    def always_long(self: Any, position_ids: Tensor, device: Any, layer_type: str | None = None) -> None:
        functions.long_or_short(self, position_ids + 8, device, layer_type)

    assert not functions._rope_agrees(always_long.__code__, functions.long_or_short, always_long)


class Turned(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Embeddings times what RoPE gives for their positions."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.rotary_emb, self.embed = module, nn.Embedding(64, 8)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        cos, sin = self.rotary_emb(self.embed.weight, position_ids)
        return (self.embed(input_ids) * cos + sin).square().sum()


@pytest.mark.parametrize("T", [pytest.param(15, marks=slow), pytest.param(16, marks=slow), 17])
@pytest.mark.parametrize("name", ["phi3_longrope", "llama_dynamic", pytest.param("phimoe_longrope", marks=slow)])
def test_the_longest_position_is_that_of_all_ranks(name: str, T: int) -> None:
    """One of 4 ranks has the longest position. Dynamic frequencies shrink after a longer row."""
    module, _ = rope_of(name)
    with torch.no_grad():
        module(torch.zeros(1, 1), torch.arange(21)[None])
    ids = torch.arange(T + 3)[None]
    positions = torch.cat([torch.arange(T), torch.arange(3)])[None]
    tokens = {"input_ids": 1, "position_ids": 1}
    torch._dynamo.reset()
    sharding = cp.Sharding(4, tokens, cp.PositionIds("position_ids"), across_documents=True)
    report = cp.check(Turned(module), sharding, {"input_ids": ids, "position_ids": positions})
    assert report.largest <= 1e-6, str(report)
