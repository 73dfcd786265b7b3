"""cp.token_mean: value and gradients of one process, whatever the ranks' counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cp_rewrite import PositionIds, Sharding, backend
from cp_rewrite.batch.gradients import _token_mean, sum_gradients, token_mean
from tests.helpers.pool import Pool

VOCAB, WIDTH = 11, 5


def sharding_of(mesh: Any) -> Sharding:
    return Sharding(mesh, tokens={"input_ids": 1, "position_ids": 1}, packing=PositionIds("position_ids"))


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Weight, tokens and labels of a toy model; ignored labels stand unevenly."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB, WIDTH, generator=generator)
    x = torch.randn(12, WIDTH, generator=generator)
    labels = torch.randint(0, VOCAB, (12,), generator=generator)
    labels[:5] = -100
    labels[9] = -100
    return weight, x, labels


def loss_of(weight: Tensor, x: Tensor, labels: Tensor, sharding: Sharding) -> Tensor:
    total = F.cross_entropy(x @ weight.T, labels, ignore_index=-100, reduction="sum")
    return token_mean(total, (labels != -100).sum(), sharding)


def one_process() -> tuple[float, Tensor]:
    weight, x, labels = problem()
    weight.requires_grad_()
    loss = F.cross_entropy(x @ weight.T, labels, ignore_index=-100)
    loss.backward()
    assert weight.grad is not None
    return loss.item(), weight.grad


def run_rank(mesh: DeviceMesh) -> dict[str, Any]:
    sharding, rank, world_size = sharding_of(mesh), mesh.get_local_rank(), mesh.size()
    found: dict[str, Any] = {}
    compiled = cast(Callable[..., Tensor], torch.compile(loss_of, backend="aot_eager", fullgraph=True))
    for name, function in {"eager": loss_of, "compiled": compiled}.items():
        weight, x, labels = problem()
        weight.requires_grad_()
        part = slice(rank * len(x) // world_size, (rank + 1) * len(x) // world_size)
        loss = function(weight, x[part], labels[part], sharding)
        loss.backward()
        sum_gradients([cast(nn.Parameter, weight)], sharding)
        assert weight.grad is not None
        found[name] = (loss.item(), weight.grad.numpy())
    nothing = torch.ones((), requires_grad=True)
    mean = token_mean(nothing, 0, sharding)
    mean.backward()
    assert nothing.grad is not None
    found["count 0"] = (mean.item(), nothing.grad.item())
    found["weights"] = token_mean(torch.tensor(1.0 + rank), 0.5 * (rank + 1), sharding).item()
    return found


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, pool: Pool) -> list[dict[str, Any]]:
    return pool.run(request.param, run_rank)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_ranks_give_the_loss_and_gradients_of_one_process(ranks: list[dict[str, Any]], how: str) -> None:
    loss, gradient = one_process()
    for found in ranks:
        assert found[how][0] == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(torch.from_numpy(found[how][1]), gradient, rtol=1e-5, atol=1e-6)


def outputs(x: Tensor, position_ids: Tensor, weight: Tensor) -> dict[str, Tensor]:
    h = x * weight
    return {"sum": h.square().sum(), "mean": h.mean(), "count": (h > 0).sum(), "rows": h}


def whole_on(mesh: DeviceMesh) -> dict[str, Any]:
    """For each output of a compiled model the value of `whole`, or its error; and the gradient through these."""
    sharding = Sharding(mesh, {"x": 1, "position_ids": 1}, PositionIds("position_ids"), inner="eager")
    compiled = torch.compile(outputs, backend=backend(sharding), fullgraph=True)
    weight = nn.Parameter(torch.tensor(2.0))
    with sharding.shard({"x": torch.arange(7.0)[None] - 2, "position_ids": torch.arange(7)[None]}) as local:
        out = compiled(**local, weight=weight)
    found: dict[str, Any] = {name: sharding.whole(out[name]).detach() for name in ("sum", "mean", "count")}
    again = sharding.whole(sharding.whole(out["sum"])) / 2 + sharding.whole(out["mean"]) / 2
    again.backward()
    sum_gradients([weight], sharding)
    assert weight.grad is not None
    for name, value in {"rows": out["rows"], "other": out["sum"] / 2}.items():
        with pytest.raises(ValueError, match="whole") as caught:
            sharding.whole(value)
        found[name] = str(caught.value)
    return found | {"grad": weight.grad.item()}


def test_outputs_are_made_whole_and_their_gradients_stay_parts(pool: Pool) -> None:
    weight, x = torch.tensor(2.0, requires_grad=True), torch.arange(7.0)[None] - 2
    alone = outputs(x, x, weight)
    (alone["sum"] / 2 + alone["mean"] / 2).backward()
    assert weight.grad is not None
    for found in pool.run(2, whole_on):
        for name in ("sum", "mean", "count"):
            torch.testing.assert_close(found[name], alone[name].detach())
        assert found["grad"] == pytest.approx(weight.grad.item())
        assert "sharding.unshard(x, 1)" in found["rows"]
        assert "what the compiled model returned" in found["other"]


def test_a_count_of_zero_gives_zero_and_no_gradient(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["count 0"] == (0.0, 0.0)


def test_counts_may_be_weights(ranks: list[dict[str, Any]]) -> None:
    assert all(found["weights"] == pytest.approx(2.0) for found in ranks)


def test_one_rank_is_a_plain_mean() -> None:
    weight, x, labels = problem()
    sharding = sharding_of(1)
    assert loss_of(weight, x, labels, sharding).item() == pytest.approx(one_process()[0], rel=1e-6)


def test_total_must_be_floating_point() -> None:
    with pytest.raises(TypeError, match="floating-point"):
        token_mean(torch.tensor(3), 1, sharding_of(1))


def test_op_is_well_formed() -> None:
    total = torch.randn(3, requires_grad=True)
    torch.library.opcheck(_token_mean, (total, torch.tensor([1, 0, 4]), ""))
