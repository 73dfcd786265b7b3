"""Tensors that lie on the host between their uses: checkpoints of blocks, and weights by FSDP's own policy."""

from __future__ import annotations

import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.integrations import parallelize as room
from cp_rewrite.integrations.offload import HostStore
from tests.helpers.pool import Pool

from .test_parallelize import Recorded, annotate, compare, train_alone, train_sharded

WIDTH = 32


def _train(mesh: DeviceMesh, inner: str, offload: Any) -> tuple[Recorded, int]:
    """Steps of a model whose blocks are checkpointed, and the bytes that went to the host."""
    stores: list[HostStore] = []

    def store() -> HostStore:
        stores.append(HostStore(small=0))
        return stores[-1]

    with patch.object(room, "HostStore", store):
        steps = train_sharded(mesh, "by blocks", checkpointing=True, inner=inner, offload=offload)
    return steps, sum(each.moved for each in stores)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_offload_changes_nothing(pair: Pool, inner: str) -> None:
    """Losses, gradients and weights; each block's input but the last's is on the host until the backward reads it."""
    expected = train_alone()
    rows = 16 + 16 + 21 + 16  # half of each micro-batch's tokens
    for steps, moved in pair.run(2, _train, inner, ("checkpoints", "weights")):
        compare(expected, steps)
        assert moved == rows * WIDTH * 4, "the input of the first of two blocks"


def _chain(store: HostStore, count: int) -> tuple[Tensor, Tensor, list[weakref.ref[Tensor]]]:
    """Products of `count` matrices whose inputs are held by a store: the result, what came in, who the inputs are."""
    torch.manual_seed(0)
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(count)]
    first = x = torch.randn(4, 8, requires_grad=True)
    seen: list[weakref.ref[Tensor]] = []
    for weight in weights:
        x = x * 1
        seen.append(weakref.ref(x))
        with store.holding([x]):
            x = (x @ weight).sin() * x
    return x.sum(), first, seen


def test_what_went_to_the_host_is_not_on_the_device() -> None:
    kept, held = HostStore(small=1 << 20), HostStore(small=0)
    plain, first, _ = _chain(kept, 5)
    plain.backward()
    loss, again, seen = _chain(held, 5)
    assert not any(x() is not None for x in seen[:-1]), "the device has them still"
    loss.backward(retain_graph=True)
    once = again.grad
    assert first.grad is not None
    assert once is not None
    torch.testing.assert_close(once, first.grad, rtol=0, atol=0)
    again.grad = None
    loss.backward()
    torch.testing.assert_close(again.grad, first.grad, rtol=0, atol=0)
    assert kept.moved == 0
    assert held.moved == 5 * 4 * 8 * 4, "each went once, though two ops read it"


def test_what_gradients_do_not_reach_stays() -> None:
    store, x = HostStore(small=0), torch.randn(4, 8)
    weight = torch.randn(8, 8, requires_grad=True)
    with store.holding([x, 3, None]):
        (x @ weight).sum().backward()
    with torch.no_grad(), store.holding([weight]):
        _ = weight * weight
    assert store.moved == 0


@pytest.mark.parametrize("offload", ["checkpoints", ("activations",)])
def test_names_are_checked(offload: Any) -> None:
    mesh = DeviceMesh("cpu", torch.arange(1), _init_backend=False, _rank=0)
    with pytest.raises(ValueError, match="offload"):
        cp.parallelize(nn.Linear(2, 2), mesh, annotate(mesh), offload=offload)
