"""Sums of gradients over ranks: large ones in place, small ones together, any layout and dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.helpers.pool import Pool


def run_rank(mesh: DeviceMesh) -> list[torch.Tensor | None]:
    sharding = cp.Sharding(mesh, {"x": 0}, cp.PositionIds("x"))
    shapes = ((1 << 19,), (700, 800), (3, 5), (), (1 << 18,), (7,))
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    parameters += [nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))]
    for number, p in enumerate(parameters[:5] + parameters[6:]):
        p.grad = torch.full_like(p, number + 1.0) * (sharding.rank + 1)
    assert parameters[1].grad is not None
    parameters[1].grad = torch.arange(800.0 * 700).view(800, 700).t() * (sharding.rank + 1)
    cp.sum_gradients([*parameters, parameters[0], parameters[3]], sharding)
    return [p.grad for p in parameters]


def run_uneven(mesh: DeviceMesh) -> str:
    sharding = cp.Sharding(mesh, {"x": 0}, cp.PositionIds("x"))
    parameters = [nn.Parameter(torch.zeros(4, 2)) for _ in range(2)]
    parameters[mesh.get_local_rank()].grad = torch.ones(4, 2)
    with pytest.raises(RuntimeError) as caught:
        cp.sum_gradients(parameters, sharding)
    return str(caught.value)


def test_gradients_of_other_parameters_raise(pool: Pool) -> None:
    for error in pool.run(2, run_uneven):
        assert "ranks [1] of the group have gradients of other parameters than rank 0" in error
        assert "parameter 0: torch.float32 (4, 2)" in error


def test_parameters_must_be_an_iterable_of_them() -> None:
    sharding, model = cp.Sharding(1, {"x": 0}, cp.PositionIds("x")), nn.Linear(2, 2)
    for wrong, says in (
        (model, "such as model.parameters\\(\\), got Linear"),
        (model.weight, "got Parameter"),
        (model.named_parameters(), "not names or groups"),
    ):
        with pytest.raises(TypeError, match=says):
            cp.sum_gradients(wrong, sharding)  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_gradient_is_summed_once(world_size: int, pool: Pool) -> None:
    factor = world_size * (world_size + 1) / 2
    for grads in pool.run(world_size, run_rank):
        for number, grad in zip((1, 2, 3, 4, 5, None, 6), grads, strict=True):
            if number is None:
                assert grad is None
            elif number == 2:
                assert torch.equal(grad, torch.arange(800.0 * 700).view(800, 700).t() * factor)
            else:
                assert (grad == number * factor).all()
                assert grad.dtype == (torch.bfloat16 if number == 6 else torch.float32)


def test_sparse_gradients_are_refused() -> None:
    embed = nn.Embedding(5, 3, sparse=True)
    embed(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"\(5, 3\) is sparse"):
        cp.sum_gradients(embed.parameters(), cp.Sharding(2, {"x": 0}, cp.PositionIds("x")))
