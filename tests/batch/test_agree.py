"""Faults: a rank that holds another batch, layout or graph makes every rank raise, with the difference named."""

from __future__ import annotations

import dataclasses
import io
import time
import warnings
from contextlib import nullcontext, redirect_stderr
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.agree import heartbeat, turns
from tests.helpers.pool import Pool


def batch_of(lengths: list[int]) -> dict[str, Tensor]:
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return {"x": torch.arange(8.0).expand(*positions.shape, -1), "position_ids": positions}


def shard_on(mesh: DeviceMesh, odd: dict[str, Any]) -> tuple[str, float]:
    """(the error, seconds) of a rank; the last one has `odd` settings."""
    mine = odd if mesh.get_local_rank() == mesh.size() - 1 else {}
    sharding = cp.Sharding(mesh, {"x": 1, "position_ids": 1}, cp.PositionIds("position_ids"), "contiguous")
    good = batch_of([5, 11])
    with sharding.shard(good):
        pass
    other = dataclasses.replace(sharding, **mine.get("options", {}))
    start = time.perf_counter()
    try:
        odd_batch = {**good, **batch_of(mine.get("lengths", [5, 11])), **mine.get("values", {})}
        with other.shard(odd_batch, shift_labels=mine.get("shift_labels", False)):
            error = ""
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    seconds = time.perf_counter() - start
    # The next batch is good again on all ranks.
    with dataclasses.replace(sharding, layout="balanced").shard(good):
        return error, seconds


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"options": {"layout": "head_tail"}}, "layout: head_tail"),
        ({"options": {"pad_to_multiple": 16}}, "rows per rank: 16"),
        ({"lengths": [5, 12]}, "tokens: 17"),
        ({"lengths": [6, 10]}, "lengths: [6, 10]"),
        ({"values": {"x": torch.zeros(1, 3, 8)}}, "token dims must have one length"),
        ({"values": {"x": torch.ones(1, 16, 8)}}, "x: torch.float32 (1, 16, 8), values "),
        ({"values": {"labels": torch.ones(1, 16)}}, "labels: torch.float32 (1, 16)"),
        ({"shift_labels": True}, "'labels' are to be shifted, by shift_labels=True or by a trainer"),
    ],
    ids=["layout", "padding", "tokens", "documents", "broken", "values", "arguments", "labels"],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_another_batch_raises_on_every_rank(pool: Pool, world_size: int, odd: dict[str, Any], says: str) -> None:
    last = world_size - 1
    for rank, (error, seconds) in enumerate(pool.run(world_size, shard_on, odd)):
        assert says in error
        assert rank == last or f"rank {last} of" in error or f"ranks [{last}]" in error
        assert seconds < 20


class Attention(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        document = (position_ids == 0).cumsum(-1)
        mask = (document[:, :, None] == document[:, None, :]).tril()[:, None]
        h = x[:, None]
        for _ in range(self.layers):
            h = nn.functional.scaled_dot_product_attention(h, h, h, mask)
        return h


def compile_on(mesh: DeviceMesh, differs: str) -> str:
    odd = mesh.get_local_rank() > 0
    tokens = {"x": 1, "position_ids": 1}
    options: dict[str, Any] = {"strict": not odd} if differs == "annotation" else {}
    sharding = cp.Sharding(mesh, tokens, cp.PositionIds("position_ids"), inner="eager", **options)
    compiled = torch.compile(Attention(2 + (odd and differs == "graph")), backend=cp.backend(sharding), fullgraph=True)
    torch.set_grad_enabled(not (odd and differs == "grad mode"))
    found = turns._versions()
    versions = mock.patch.object(turns, "_versions", return_value=["torch: 9.9" if odd else found[0], *found[1:]])
    with (
        versions if differs == "version" else nullcontext(),
        sharding.shard(batch_of([16, 16])) as local,
        pytest.raises(RuntimeError) as caught,
    ):
        compiled(**local)
    torch.set_grad_enabled(True)
    torch._dynamo.reset()
    return str(caught.value)


@pytest.mark.parametrize(
    ("differs", "says"),
    [("graph", "@@"), ("annotation", "strict: False"), ("grad mode", "grad mode: False"), ("version", "torch: 9.9")],
)
def test_another_graph_raises_on_every_rank(pool: Pool, differs: str, says: str) -> None:
    for error in pool.run(3, compile_on, differs):
        assert "ranks [1, 2] of the group compiled another graph" in error
        assert "First differences" in error
        assert says in error


class Refused(nn.Module):
    def __init__(self, transforms: int) -> None:
        super().__init__()
        self.transforms = transforms

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        h = x + position_ids[..., None]
        for _ in range(self.transforms):
            h = torch.fft.fft(h, dim=1).real
        return h


def refuse_on(mesh: DeviceMesh, transforms: int, strict: bool = True) -> str:
    """Rank r's model is refused r + `transforms` times."""
    tokens = {"x": 1, "position_ids": 1}
    sharding = cp.Sharding(mesh, tokens, cp.PositionIds("position_ids"), inner="eager", strict=strict)
    model = Refused(transforms + mesh.get_local_rank())
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    try:
        with sharding.shard(batch_of([16, 16])) as local, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled(**local)
    except RuntimeError as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}"
    finally:
        torch._dynamo.reset()
    return ""


def test_refusals_in_other_words_are_refusals_on_every_rank(pool: Pool) -> None:
    for error in pool.run(2, refuse_on, 1):
        assert error.startswith("cp_rewrite.RewriteRefused: cp_rewrite refused to rewrite this graph:"), error
        assert "_fft_r2c runs over the token dim" in error
    assert pool.run(2, refuse_on, 1, False) == ["", ""]
    accepts, refuses = pool.run(2, refuse_on, 0)
    assert "rank 1 of the group brought no graph: RewriteRefused: " in accepts
    assert "_fft_r2c runs over the token dim" in accepts
    assert refuses.startswith("cp_rewrite.RewriteRefused")


def fail_on(mesh: DeviceMesh) -> str:
    """The last rank calls its model with the whole row."""
    sharding = cp.Sharding(mesh, {"x": 1, "position_ids": 1}, cp.PositionIds("position_ids"), inner="eager")
    compiled = torch.compile(Attention(1), backend=cp.backend(sharding), fullgraph=True)
    batch = batch_of([16, 16])
    with sharding.shard(batch) as local, pytest.raises(Exception, match="model") as caught:
        compiled(**(batch if mesh.get_local_rank() == mesh.size() - 1 else local))
    torch._dynamo.reset()
    return str(caught.value)


def test_a_graph_that_fails_raises_on_every_rank(pool: Pool) -> None:
    errors = pool.run(3, fail_on)
    assert all("has 32 tokens at dim 1, but the model is called inside a batch" in error for error in errors)
    assert all("rank 2 of the group brought no graph: ValueError" in error for error in errors[:2])


def absent_on(mesh: DeviceMesh) -> tuple[str, float]:
    """The last rank brings no batch; the others' group waits for 3 seconds."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    if mesh.get_local_rank() == mesh.size() - 1:
        return "", 0.0
    sharding = cp.Sharding(mesh, {"x": 1, "position_ids": 1}, cp.PositionIds("position_ids"))
    start = time.perf_counter()
    with pytest.raises(RuntimeError) as caught, sharding.shard(batch_of([5, 11])):
        pass
    return str(caught.value), time.perf_counter() - start


def weights_on(mesh: DeviceMesh, differs: str) -> str:
    """The error of a rank's first step; the last rank's `differs` is another."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    model.register_buffer("scale", torch.ones(4096))
    if mesh.get_local_rank() == mesh.size() - 1:
        with torch.no_grad():
            model.get_parameter("bias").mul_(2) if differs == "bias" else model.get_buffer("scale").mul_(2)
    sharding = cp.Sharding(mesh, {"x": 1, "position_ids": 1}, cp.PositionIds("position_ids"), inner="eager")

    def forward(x: Tensor, position_ids: Tensor) -> Tensor:
        return model(x).square().sum() * model.get_buffer("scale").sum()

    with sharding.shard(batch_of([5, 11])) as local:
        try:
            torch.compile(forward, backend=cp.backend(sharding), fullgraph=True)(**local)
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("differs", ["bias", "scale"])
def test_other_weights_raise_on_every_rank_at_the_first_step(pool: Pool, differs: str) -> None:
    for error in pool.run(2, weights_on, differs):
        assert "ranks [1] of the group have other weights or buffers than rank 0" in error
        assert differs in error
        assert "torch.float32" in error


def test_an_absent_rank_is_named_within_the_timeout(pool: Pool) -> None:
    for error, seconds in pool.run(4, absent_on)[:-1]:
        assert "rank 3 of the group brought no batch within the group's timeout" in error
        assert seconds < 10


def skips_on(mesh: DeviceMesh) -> tuple[str, float]:
    """The last rank skips `sum_gradients` of a step and goes on to the next batch."""
    sharding = cp.Sharding(mesh, {"x": 1, "position_ids": 1}, cp.PositionIds("position_ids"))
    weight, start = nn.Parameter(torch.ones(2)), time.perf_counter()
    weight.grad = torch.ones(2)

    def step(skip: bool) -> None:
        with sharding.shard(batch_of([5, 11])):
            pass
        if not skip:
            cp.sum_gradients([weight], sharding)
        with sharding.shard(batch_of([5, 11])):
            pass

    with pytest.raises(RuntimeError) as caught:
        step(mesh.get_local_rank() == mesh.size() - 1)
    cp.sum_gradients([weight], sharding)  # all are in step again
    return str(caught.value), time.perf_counter() - start


def test_a_rank_that_skips_a_sum_is_named_at_once(pool: Pool) -> None:
    for error, seconds in pool.run(3, skips_on):
        assert "rank 0, 1 calls cp.sum_gradients; rank 2 enters sharding.shard(batch)" in error
        assert "skip a step by what is equal on all of them" in error
        assert seconds < 10


def late_after_an_error_on(mesh: DeviceMesh) -> int:
    """All ranks leave a batch with an error, and the last one takes its time until the next."""
    sharding = cp.Sharding(mesh, {"x": 1, "position_ids": 1}, cp.PositionIds("position_ids"))
    with pytest.raises(ZeroDivisionError), sharding.shard(batch_of([5, 11])):
        _ = 1 // 0
    if mesh.get_local_rank() == mesh.size() - 1:
        time.sleep(heartbeat.PERIOD_S + 1.5)
    with sharding.shard(batch_of([5, 11])) as local:
        return local["x"].shape[1]


def test_a_batch_that_failed_on_all_ranks_is_behind_them(pool: Pool) -> None:
    assert pool.run(2, late_after_an_error_on) == [8, 8]


def late_on(mesh: DeviceMesh) -> str:
    """The text that each rank prints when the last rank comes after 5 seconds, of which others wait 3 in silence."""
    sharding = cp.Sharding(mesh, {"x": 1, "position_ids": 1}, cp.PositionIds("position_ids"))
    printed = io.StringIO()
    with sharding.shard(batch_of([5, 11])):
        pass
    with mock.patch.object(turns, "PATIENCE_S", 3.0), redirect_stderr(printed):
        if mesh.get_local_rank() == mesh.size() - 1:
            time.sleep(5)
        with sharding.shard(batch_of([5, 11])):
            pass
    return printed.getvalue()


def test_a_rank_that_others_wait_for_is_named_with_its_line(pool: Pool) -> None:
    for printed in pool.run(2, late_on)[:-1]:
        assert "rank 0, which enters sharding.shard(batch), has waited 3 s for rank 1, which is at" in printed
        assert "`time.sleep(5)`" in printed


def batch_seconds(mesh: DeviceMesh) -> float:
    sharding = cp.Sharding(mesh, {"x": 1, "position_ids": 1}, cp.PositionIds("position_ids"))
    batch = batch_of([300] * 40)
    with sharding.shard(batch) as local:
        start = time.perf_counter()
        for _ in range(50):
            turns.on_batch(sharding, local.plan, batch)
    return (time.perf_counter() - start) / 50


def test_agreement_is_cheap(pool: Pool) -> None:
    assert max(pool.run(2, batch_seconds)) < 0.1
