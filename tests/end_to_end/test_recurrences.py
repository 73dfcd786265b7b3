"""Models that pass a state through tokens: one process's loss and gradients, on any rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from tests.helpers.pages import run_line
from tests.helpers.pool import Pool
from tests.helpers.recurrent_model import KINDS, TOKENS, RecurrentModel, packed

PACKING = cp.CuSeqlens("cu_seqlens")
Lengths = Sequence[int]


def grads_of(model: RecurrentModel) -> dict[str, Tensor]:
    return {key: p.grad.double() for key, p in model.named_parameters() if p.grad is not None}


def sharded_step(
    mesh: DeviceMesh, kinds: Sequence[str], resets: bool, batches: Sequence[Any], layout: Any, dtype: torch.dtype
) -> list[tuple[float, dict[str, Any]]]:
    sharding = cp.Sharding(mesh, TOKENS, PACKING, layout, "all_gather", inner="aot_eager")
    torch._dynamo.reset()
    model = RecurrentModel(kinds, resets).to(dtype)
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    found: list[tuple[float, dict[str, Any]]] = []
    for batch in batches:
        model.zero_grad()
        with sharding.shard(batch) as local:
            loss = compiled(**local)
            loss.backward()
        cp.sum_gradients(model.parameters(), sharding)
        found.append((loss.item(), {key: grad.numpy() for key, grad in grads_of(model).items()}))
    return found


def compare(
    pool: Pool,
    ranks: int,
    layout: str,
    sizes: Sequence[Lengths],
    *,
    kinds: Sequence[str] = KINDS,
    resets: bool = False,
    dtype: torch.dtype = torch.float64,
) -> None:
    """`sizes`: lengths of documents, of batches that follow each other."""
    batches = [packed(lengths) for lengths in sizes]
    results = pool.run(ranks, sharded_step, kinds, resets, batches, layout, dtype)
    limit = 1e-7 if dtype is torch.float64 else 1e-5
    for i, batch in enumerate(batches):
        model = RecurrentModel(kinds, resets).to(dtype)
        loss = model(**batch)
        loss.backward()
        assert sum(rank[i][0] for rank in results) == pytest.approx(loss.item(), rel=limit)
        for key, grad in grads_of(model).items():
            error = (torch.from_numpy(results[0][i][1][key]) - grad).norm()
            assert error <= limit * grad.norm(), f"{key}: {error}, of batch {i}"


@pytest.mark.parametrize("resets", [False, True])
def test_states_are_those_of_one_process(pool: Pool, resets: bool) -> None:
    compare(pool, 2, "balanced", [(5, 1, 70, 9)], resets=resets)


@pytest.mark.slow
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize(
    ("ranks", "layout", "sizes", "dtype"),
    [
        (2, "head_tail", [(131,), (1, 1, 1)], torch.float64),
        (3, "contiguous", [(64, 1, 130), (7, 200)], torch.float64),
        (3, "balanced", [(1, 1, 1, 1, 1), (65, 64, 63)], torch.float32),
        (4, "dual_chunk", [(300, 5, 1, 12), (9,)], torch.float64),
        (4, "balanced", [(190, 3, 40, 1)], torch.float32),
    ],
)
def test_states_on_more_ranks(
    pool: Pool, ranks: int, layout: str, sizes: Sequence[Lengths], dtype: torch.dtype, resets: bool
) -> None:
    compare(pool, ranks, layout, sizes, resets=resets, dtype=dtype)


def explained(model: Any, **how: Any) -> Any:
    return cp.explain(model, cp.Sharding(2, TOKENS, PACKING, **how))(**packed((5, 1, 70)))


class Shifted(RecurrentModel):
    """Its second layer starts anew at other offsets than the packing's, of as many entries."""

    def offsets(self, number: int, cu_seqlens: Tensor) -> Tensor:
        return cu_seqlens.flip(0) if number else cu_seqlens


class Written(RecurrentModel):
    """It writes over the packing's offsets before they are read."""

    def offsets(self, number: int, cu_seqlens: Tensor) -> Tensor:
        cu_seqlens[1] = 3
        return cu_seqlens


class Checkpointed(RecurrentModel):
    """Its layers are checkpointed; all but the first are given other offsets, if `shifted`."""

    shifted = False

    def layer(self, kind: str, number: int, h: Tensor, offsets: Tensor | None) -> Tensor:
        assert offsets is not None
        given = offsets.flip(0) if self.shifted and number else offsets
        return checkpoint(super().layer, kind, 0, h, given, use_reentrant=False)  # type: ignore[return-value]


class OfTokens(RecurrentModel):
    """Its documents lie in dim 0."""

    def layer(self, kind: str, number: int, h: Tensor, offsets: Tensor | None) -> Tensor:
        return super().layer(kind, number, h.transpose(0, 1), offsets).transpose(0, 1)


@pytest.mark.parametrize("model", [Shifted, Written])
def test_other_offsets_than_the_packings_are_refused(model: type[RecurrentModel]) -> None:
    refusals = explained(model(("ssd", "ssd"), resets=True)).refusals
    assert refusals
    assert {refusal.reason for refusal in refusals} <= {cp.Reason.MASK_WRONG_SOURCE, cp.Reason.TOKEN_MIXING}


@pytest.mark.parametrize("shifted", [False, True])
def test_checkpointed_layers_know_the_packings_offsets(shifted: bool) -> None:
    model = Checkpointed(("ssd", "ssd"), resets=True).double()
    model.shifted = shifted
    if shifted:
        assert {r.reason for r in explained(model).refusals} == {cp.Reason.MASK_WRONG_SOURCE}
        return
    sharding, batch = cp.Sharding(2, TOKENS, PACKING, "balanced"), packed((5, 1, 70))
    torch._dynamo.reset()
    assert cp.check(model, sharding, batch).largest <= 1e-9


def test_tokens_in_another_dim_are_refused() -> None:
    (refusal,) = explained(OfTokens(("ssd",))).refusals
    assert "without tokens in dim 1" in refusal.detail


def test_without_resolve_states_are_refused() -> None:
    (refusal,) = explained(RecurrentModel(("ssd",)), resolve=False).refusals
    assert "needs resolve=True" in refusal.detail


@pytest.mark.slow
def test_a_group_of_layers_is_benchmarked(tmp_path: Path) -> None:
    printed = run_line("torchrun --nproc-per-node 2 examples/bench/states.py --tiny --group", tmp_path)
    assert [line.split(" | ")[1] for line in printed.splitlines()] == ["3 documents", "one document"]
