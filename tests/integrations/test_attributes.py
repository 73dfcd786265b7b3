"""Objects of Python that modules hold, of a model that is parallelized: shared with its user, or refused by name."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import cp_rewrite as cp
from cp_rewrite.batch.marks import is_part
from tests.helpers.pool import Pool

D, LENGTHS = 8, (24, 19, 30)
Change = Callable[["Net", float], Any]
"""A change of a model by its user before a step, from a number of the step."""


class Box:
    def __init__(self) -> None:
        self.scale, self.seen = 1.0, list[float]()


BOX = Box()
"""An object that modules and the code of a model both read."""


class Block(nn.Module):
    """Scales by what `held` says, an object of Python."""

    def __init__(self, held: Any = None, read: Callable[[Any], Any] = lambda held: 1.0) -> None:
        super().__init__()
        self.qkv, self.held, self.read = nn.Linear(D, 3 * D), held, read

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, D)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return x * self.read(self.held)


class Net(nn.Module):
    """`before`: what its forward does first."""

    def __init__(
        self, held: Any = None, read: Callable[[Any], Any] = lambda held: 1.0, before: Callable[[Any], Any] = id
    ) -> None:
        super().__init__()
        self.embed, self.head, self.before = nn.Embedding(64, D), nn.Linear(D, 8), before
        self.layers = nn.ModuleList(Block(held, read) for _ in range(2))

    def forward(self, ids: Tensor, doc_ids: Tensor, labels: Tensor) -> Tensor:
        if self.before is not id:
            self.before(self)
        x, mask = self.embed(ids), (doc_ids[:, None, :, None] == doc_ids[:, None, None, :]).tril()
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")


def halve(net: Net) -> None:
    BOX.scale = BOX.scale / 2 + 1


def note(net: Net) -> None:
    net.calls = getattr(net, "calls", 0) + 1
    net.norm = net.head.weight.norm().detach()
    BOX.seen.append(net.calls)


def of_box(box: Any) -> Any:
    return box.scale


def nothing(net: Net, number: float) -> None:
    pass


def set_box(net: Net, number: float) -> None:
    net.layers[0].held.scale = number


def set_tensor(net: Net, number: float) -> None:
    net.layers[0].held.fill_(number)


def new_box(net: Net, number: float) -> None:
    for layer in net.layers:
        layer.held = Box()
        layer.held.scale = number


def seen_of(net: Net) -> tuple[Any, ...]:
    return BOX.scale, len(BOX.seen), getattr(net, "calls", 0), float(getattr(net, "norm", 0))


RIGHT: dict[str, tuple[Callable[[], Net], Change]] = {
    "a global that the model writes": (lambda: Net(BOX, of_box, halve), nothing),
    "what the model keeps on itself": (lambda: Net(before=note), nothing),
    "an object that its user writes": (lambda: Net(Box(), of_box), set_box),
    "a tensor that its user writes": (lambda: Net(torch.ones(()), lambda held: held), set_tensor),
    "a new object": (lambda: Net(Box(), of_box), new_box),
    "a deque and a lock": (
        lambda: Net((deque([1.0]), threading.Lock()), lambda held: held[0][-1]),
        lambda net, number: net.layers[1].held[0].append(number),
    ),
}


def holding(change: Callable[[Net], Any] | None = None) -> Net:
    """A model whose blocks hold an object that holds its head."""
    box: Any = Box()
    net = Net(box, of_box, (lambda net: change(net)) if change is not None else id)
    box.head = net.head
    return net


def tied() -> Net:
    net = Net().double()
    net.view = net.head.weight.detach()
    return net


def trained_aside() -> Net:
    net = Net()
    net.layers[1].bias = torch.zeros(D, requires_grad=True)
    return net


def scale_held(net: Net) -> None:
    net.layers[0].held.scale = 2.0


class Uncopied(Box):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is one")


def uncopied() -> Net:
    net, box = Net(), Uncopied()
    box.scale = net.head  # pyright: ignore
    net.held = box
    return net


REFUSED: dict[str, tuple[Callable[[], Net], Change, str]] = {
    "a write into what holds a module": (
        lambda: holding(scale_held),
        nothing,
        r"layers\.\d\.held, which holds modules",
    ),
    "a change of what holds a module": (holding, set_box, r"layers\.\d\.held holds modules and was changed"),
    "what can't be copied holds a module": (uncopied, nothing, r"held holds modules .* can't be copied .*there is one"),
    "a view of a weight": (tied, nothing, "view shares memory with head.weight"),
    "a tensor that takes gradients": (trained_aside, nothing, "layers.1.bias holds a tensor that takes gradients"),
}


def steps(made: Callable[[], Net], change: Change, mesh: DeviceMesh | None) -> list[Any]:
    """The loss, the gradients and what a user reads of the model, for each step."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    net, sharding = made().double(), None
    BOX.__init__()
    if mesh is not None:
        sharding = cp.Sharding(
            mesh, dict.fromkeys(("ids", "doc_ids", "labels"), 1), cp.DocumentIds("doc_ids"), inner="eager"
        )
        cp.parallelize(net, mesh, sharding)
    found: list[Any] = []
    for i, length in enumerate(LENGTHS):
        change(net, 1 + i / 4)
        ids = torch.arange(length)[None]
        batch = {"ids": ids, "doc_ids": ids // 11, "labels": ids % 8}
        with nullcontext(batch) if sharding is None else sharding.shard(batch) as local:
            loss = net(**local)
        loss.backward()
        total = loss.detach().clone()
        if sharding is not None and is_part(loss):
            torch.distributed.all_reduce(total, group=sharding.group)
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        found.append((total, [g.full_tensor() if isinstance(g, DTensor) else g.clone() for g in grads], seen_of(net)))
        net.zero_grad()
    return found


def on_rank(mesh: DeviceMesh, name: str) -> list[Any]:
    return steps(*RIGHT[name], mesh)


def error_on_rank(mesh: DeviceMesh, name: str) -> str:
    made, change, _ = REFUSED[name]
    with pytest.raises((ValueError, RuntimeError)) as raised:
        steps(made, change, mesh)
    return str(raised.value)


@pytest.mark.parametrize("name", RIGHT)
def test_objects_are_shared(pair: Pool, name: str) -> None:
    expected = steps(*RIGHT[name], None)
    for found in pair.run(2, on_rank, name):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_shared_is_named(pair: Pool, name: str) -> None:
    for error in pair.run(2, error_on_rank, name):
        assert pytest.raises(ValueError, match=REFUSED[name][2]).matches(ValueError(error))
