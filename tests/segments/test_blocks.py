"""Blocks of a model that Dynamo reads once: reports are as where it reads each; where it can't, it reads each."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from cp_rewrite import passes
from cp_rewrite.batch.marks import is_part
from cp_rewrite.passes.graph.nodes import graph_modules
from cp_rewrite.segments import blocks
from cp_rewrite.torch_internals import READS_REGIONS_ONCE
from tests.helpers.pool import Pool

D, T, LAYERS = 16, 48, 3
pytestmark = pytest.mark.skipif(not READS_REGIONS_ONCE, reason="torch before 2.13 reads each call of a region")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 8 * D), nn.Linear(8 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """`again`: how often its attention runs, which no other block of the model needs to share."""

    def __init__(self, again: int = 1) -> None:
        super().__init__()
        self.again, self.norm, self.qkv, self.mlp = again, nn.LayerNorm(D), nn.Linear(D, 3 * D), Mlp()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for _ in range(self.again):
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return x + self.mlp(x)


class Checkpointed(Block):
    def __call__(self, *args: Any) -> Any:
        return checkpoint(functools.partial(super().__call__), *args, use_reentrant=False)


class Counted(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x, mask)


def called(block: nn.Module, *args: Any) -> Any:
    return block(*args)


class Acting(Block):
    """`act`: what it ends with, which may be another module in each block of a model."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.act(super().forward(x, mask))


class Numbered(Block):
    """`number`: what kind it is tells what is done with it."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return super().forward(x, mask) * (2 if isinstance(self.number, bool) else self.number)


class Flagged(Block):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, mask: Tensor | None, flags: tuple[float, ...] = ()) -> Tensor:
        return super().forward(x, mask) * (2 if isinstance(flags[0], bool) else 3 if isinstance(flags[0], int) else 1)


def flagged(block: nn.Module, x: Tensor, mask: Tensor) -> Any:
    kind = block.kind
    return block(x, mask, flags=(True if kind == "bool" else 1 if kind == "int" else 1.0,))


class Number:
    def __init__(self) -> None:
        self.value = 1.0


class Told(Block):
    """Reads a number that the model writes between its calls, in an object that both hold."""

    def __init__(self, number: Number) -> None:
        super().__init__()
        self.told = number

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return super().forward(x, mask) * self.told.value


class Telling:
    def __init__(self) -> None:
        self.number = Number()

    def __call__(self, block: nn.Module, x: Tensor, mask: Tensor) -> Any:
        self.number.value = self.number.value / 2 + 1
        return block(x, mask)


def told_net() -> Net:
    telling = Telling()
    return Net([Told(telling.number) for _ in range(LAYERS)], telling)


class Net(nn.Module):
    """`around(block, x, mask)`: how blocks are called; `windows`: every other one gets a mask with a window."""

    def __init__(self, layers: list[nn.Module], around: Callable[..., Any] = called, windows: bool = False) -> None:
        super().__init__()
        self.embed, self.layers, self.around = nn.Embedding(64, D), nn.ModuleList(layers), around
        self.head, self.windows = nn.Linear(D, 8), windows

    def forward(self, ids: Tensor, doc_ids: Tensor, labels: Tensor) -> Tensor:
        mask = (doc_ids[:, None, :, None] == doc_ids[:, None, None, :]).tril()
        masks = [mask, mask.triu(-7)] if self.windows else [mask]
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            x = self.around(layer, x, masks[i % len(masks)])
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")


def report_of(net: nn.Module, **options: Any) -> Any:
    """The dry run of a batch of three documents on two ranks, without the times of this machine."""
    torch._dynamo.reset()
    sharding = cp.Sharding(
        mesh=2, tokens={"ids": 1, "doc_ids": 1, "labels": 1}, packing=cp.DocumentIds("doc_ids"), **options
    )
    ids = torch.arange(T)[None] % 64
    return cp.explain(net, sharding)(ids=ids, doc_ids=ids // 17, labels=ids % 8)


def told(report: Any) -> Any:
    """A report, but for its nodes' names, and for whether the last block's tiles are one with those of the loss."""
    found = report.as_dict()
    assert report.ok
    assert len(report.sites) == LAYERS
    tiled = sum(count for op, count in found["ops_after"].items() if "tiled" in op)
    after = {} if tiled else found["ops_after"]
    return tiled, found["sites"], found["collectives"], found["inserts"], after, found["target"]


@pytest.mark.parametrize("tile", [None, "auto"])
@pytest.mark.parametrize("kind", [Block, Checkpointed])
def test_a_report_is_the_same_however_blocks_are_read(
    kind: type[Block], tile: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, blocks.__name__)
    once = report_of(Net([kind() for _ in range(LAYERS)]), tile=tile)
    assert not caplog.records
    monkeypatch.setattr(blocks, "READS_REGIONS_ONCE", False)
    assert told(once) == told(report_of(Net([kind() for _ in range(LAYERS)]), tile=tile))


@pytest.mark.parametrize(
    ("net", "sites", "bodies"),
    [
        pytest.param(lambda: Net([Block(1), Block(2), Block(1), Block(2), Block(1)]), 7, 3, id="two kinds of blocks"),
        pytest.param(lambda: Net([Block() for _ in range(4)], windows=True), 4, 2, id="two masks in turns"),
        pytest.param(lambda: Net([Acting(act()) for act in [nn.Tanh, nn.ReLU] * 2]), 4, 2, id="two activations"),
    ],
)
def test_each_kind_of_block_is_read_once(
    net: Callable[[], Net], sites: int, bodies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[int] = []
    run_passes = passes.run_passes

    def counted(state: passes.State) -> passes.State:
        nodes = [node for module in graph_modules(state.graph_module) for node in module.graph.nodes]
        captured.append(sum(node.target is F.scaled_dot_product_attention for node in nodes))
        return run_passes(state)

    monkeypatch.setattr(passes, "run_passes", counted)
    report = report_of(net())
    assert len(report.sites) == sites
    assert captured == [bodies]


@pytest.mark.parametrize(
    "net",
    [
        pytest.param(lambda: Net([Counted() for _ in range(LAYERS)]), id="a block that writes into its buffer"),
        pytest.param(
            lambda: Net([Block() for _ in range(LAYERS)], functools.partial(checkpoint, use_reentrant=False)),
            id="a checkpoint around the call of a block",
        ),
    ],
)
def test_blocks_that_can_not_be_read_once_are_read_as_before(net: Callable[[], Net]) -> None:
    model = net()
    classes = [type(layer) for layer in model.layers]
    assert len(report_of(model).sites) == LAYERS
    assert [type(layer) for layer in model.layers] == classes


DIFFERENT: dict[str, Callable[[], Net]] = {
    "modules of torch": lambda: Net([Acting(act()) for act in (nn.ReLU, nn.Tanh, nn.Identity, nn.Tanh)]),
    "a module or none": lambda: Net([Acting(nn.Linear(D, D) if i % 2 else nn.Identity()) for i in range(4)]),
    "1 and True": lambda: Net([Numbered(number) for number in (1, True, 1.0, 1)]),
    "1 and True of a call": lambda: Net([Flagged(kind) for kind in ("int", "bool", "float", "int")], flagged),
    "an object that the model writes into": told_net,
}


def step(net: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = net(**batch)
    loss.backward()
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return loss, {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}


def made(name: str) -> Net:
    torch.manual_seed(0)
    return DIFFERENT[name]().double()


def sharded_step(mesh: DeviceMesh, name: str, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    torch._dynamo.reset()
    sharding = cp.Sharding(mesh, dict.fromkeys(batch, 1), cp.DocumentIds("doc_ids"), inner="eager")
    model = cp.parallelize(made(name), mesh, sharding)
    with sharding.shard(batch) as local:
        loss, grads = step(model, local)
    total = loss.detach().clone()
    if is_part(loss):
        torch.distributed.all_reduce(total, group=sharding.group)
    return total, grads


@pytest.mark.parametrize("name", DIFFERENT)
def test_blocks_that_differ_in_what_no_guard_sees_are_told_apart(pool: Pool, name: str) -> None:
    ids = torch.arange(T)[None] % 64
    batch = {"ids": ids, "doc_ids": ids // 17, "labels": ids % 8}
    loss, grads = step(made(name), batch)
    for found in pool.run(2, sharded_step, name, batch):
        torch.testing.assert_close(found, (loss.detach(), grads), rtol=1e-9, atol=1e-12)


def test_blocks_that_change_alike_are_read_once_still() -> None:
    net = Net([Acting(nn.Dropout()) for _ in range(LAYERS)])
    once = blocks.ReadOnce(net)
    net.eval()
    with once.trial() as able:
        assert able
    net.layers[1].train()
    with pytest.raises(blocks.ReadApart, match="Acting are no longer alike"), once.trial():
        pass


def test_a_refusal_names_all_layers() -> None:
    class Unmasked(Block):
        def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
            return super().forward(x, None)

    report = report_of(Net([Unmasked() for _ in range(LAYERS)]))
    assert not report.ok
    assert f"(in {LAYERS} layers)" in str(report)
