"""Recurrences on the pieces of ranks, played by threads and on gloo, beside a walk over the tokens of the row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.library import opcheck

from cp_rewrite.documents import Documents
from cp_rewrite.ops.states import maps
from cp_rewrite.planning.batch_plan import BatchPlan, plan_batch
from cp_rewrite.planning.layouts.options import LayoutOptions
from cp_rewrite.planning.layouts.token_order import TokenOrder
from cp_rewrite.planning.names import LAYOUTS
from cp_rewrite.planning.plan_input import STATES, States
from cp_rewrite.planning.states import state_tables
from tests.helpers.amount import drawn
from tests.helpers.pool import Pool
from tests.helpers.recurrences import KINDS, inputs_of, options_of, oracle

ops: Any = torch.ops.cp_rewrite
RATE = 2  # which input of SSD and of a selective scan is a weight


class Ranks:
    """Threads that exchange rows as `all_to_all_rows` does."""

    def __init__(self, size: int) -> None:
        self.size, self.sent = size, [[] for _ in range(size)]
        self.barrier, self.rank = threading.Barrier(size, timeout=60), threading.local()

    def exchange(self, rows: Tensor, recv: list[int], send: list[int], group: str) -> Tensor:
        own = self.rank.value
        assert len(rows) == sum(send)
        assert not send[own]
        assert torch.isfinite(rows).all()
        self.sent[own] = list(rows.split(send))
        self.barrier.wait()
        found = [self.sent[other][own].clone() for other in range(self.size)]
        assert [len(part) for part in found] == recv
        self.barrier.wait()
        return torch.cat(found)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        found: list[Any] = [None] * self.size

        def play(rank: int) -> None:
            self.rank.value = rank
            try:
                found[rank] = work(rank)
            except Exception:
                self.barrier.abort()
                raise

        threads = [threading.Thread(target=play, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(value is not None for value in found)
        return found


def tables_of(plan: BatchPlan, read: States, rank: int) -> list[Tensor]:
    arrays = state_tables(plan, read, rank)
    assert all(arrays[tensor.name].dtype in (np.int32, np.int64) for tensor in STATES)
    return [torch.from_numpy(arrays[tensor.name]) for tensor in STATES]


def on_rank(
    kind: str, plan: BatchPlan, read: States, inputs: Sequence[Tensor], dout: Tensor, group: str, rank: int
) -> tuple[Tensor, list[Tensor]]:
    """A rank's rows of the result, and gradients of its inputs. Rows of no sequence hold NaN, and so do gradients of
    what comes of them."""
    tokens, row = plan.local_indices(rank), np.arange(len(plan.rows))[:, None]
    inside = sequence_ids(plan, read)[row, tokens] >= 0
    there = torch.from_numpy((tokens >= 0) & inside)
    local: list[Tensor] = []
    for number, x in enumerate([*inputs, dout]):
        if not (number == RATE and x.ndim < 3):
            x = x[torch.from_numpy(row), torch.tensor(tokens)]
            x = torch.where(there.view(*there.shape, *[1] * (x.ndim - 2)), x, torch.nan)
        local.append(x.detach().clone())
    leaves = [x.requires_grad_() for x in local[:-1]]
    op = getattr(ops, f"{kind}_on_pieces")
    out, *_ = op(*leaves, tables_of(plan, read, rank), *options_of(kind), group)
    out.backward(local[-1])
    assert not out[~there].any()
    return out.detach(), [x.grad for x in leaves if x.grad is not None]


def sequence_ids(plan: BatchPlan, read: States) -> Any:
    if not read.resets and not read.apart:
        ids = np.zeros((len(plan.rows), plan.rows[0].total), dtype=np.int64)
    else:
        ids = np.stack([row.document_ids() for row in plan.rows])
    return ids if read.resets else np.where(ids < 0, -1, np.searchsorted(plan.seams, np.arange(ids.shape[1]), "right"))


def bounds_of(plan: BatchPlan, read: States) -> list[tuple[int, int]]:
    """Sequences among the rows of all rows of the batch, token by token."""
    total, found = plan.rows[0].total, []
    for b, ids in enumerate(sequence_ids(plan, read)):
        for one in np.unique(ids[ids >= 0]):
            places = np.flatnonzero(ids == one)
            found.append((b * total + int(places[0]), b * total + int(places[-1]) + 1))
    return found


def expected_of(kind: str, plan: BatchPlan, read: States, inputs: Sequence[Tensor]) -> Tensor:
    flat = [x if i == RATE and x.ndim < 3 else x.flatten(0, 1) for i, x in enumerate(inputs)]
    count, found = plan.rows[0].total * len(plan.rows), {}
    for start, stop in bounds_of(plan, read):
        cut = [x if i == RATE and x.ndim < 3 else x[None, start:stop] for i, x in enumerate(flat)]
        found |= dict(zip(range(start, stop), oracle(kind, cut, None)[0], strict=True))
    zero = torch.zeros_like(next(iter(found.values())))
    return torch.stack([found.get(t, zero) for t in range(count)]).unflatten(0, (len(plan.rows), -1))


def check(kind: str, plan: BatchPlan, read: States, results: Sequence[Any], inputs: list[Tensor], dout: Tensor) -> None:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    expected = expected_of(kind, plan, read, leaves)
    expected.backward(dout)
    sums = [torch.zeros_like(x) for x in leaves]
    for rank, (out, grads) in enumerate(results):
        place = plan.local_indices(rank)
        row, at = np.nonzero(place >= 0)
        token = place[row, at]
        torch.testing.assert_close(out[row, at], expected.detach()[row, token], rtol=1e-8, atol=1e-9)
        for number, (total, grad) in enumerate(zip(sums, grads, strict=True)):
            if number == RATE and total.ndim < 3:
                total += grad
            else:
                total[row, token] += grad[row, at]
    for total, leaf in zip(sums, leaves, strict=True):
        torch.testing.assert_close(total, leaf.grad, rtol=1e-7, atol=1e-8)


def compare(monkeypatch: pytest.MonkeyPatch, kind: str, plan: BatchPlan, read: States, seed: int = 0) -> None:
    inputs = inputs_of(kind, len(plan.rows), plan.rows[0].total, seed)
    dout = torch.randn_like(expected_of(kind, plan, read, inputs))
    ranks = Ranks(plan.world_size)
    with monkeypatch.context() as patch:
        patch.setattr(maps, "all_to_all_rows", ranks.exchange)
        group = "played" if plan.world_size > 1 else ""
        results = ranks.run(lambda rank: on_rank(kind, plan, read, inputs, dout, group, rank))
    check(kind, plan, read, results, inputs, dout)


@pytest.mark.shared
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("read", [States(True), States(False, True)], ids=["resets", "row"])
def test_every_layout_gives_what_one_process_does(
    monkeypatch: pytest.MonkeyPatch, kind: str, layout: str, read: States
) -> None:
    rows = [Documents.from_lengths([1, 0, 7, 31, 1, 70], 117), Documents.from_lengths([115], 117)]
    compare(monkeypatch, kind, plan_batch(rows, 3, layout), read)


@pytest.mark.parametrize("read", [States(False), States(False, True)], ids=["row", "padded"])
def test_states_end_with_rows_that_were_joined(monkeypatch: pytest.MonkeyPatch, read: States) -> None:
    padded = Documents(np.array([0, 40, 60, 75]), np.array([37, 20, 1, 80]), 170)
    for layout in ("contiguous", "balanced"):
        compare(monkeypatch, "ssd", plan_batch([padded], 3, layout, seams=(40, 75, 160)), read)


def test_padding_within_a_row_that_was_joined_is_an_error() -> None:
    padded = Documents(np.array([0, 45, 60]), np.array([40, 10, 30]), 90)
    with pytest.raises(ValueError, match="carries padding into a document"):
        state_tables(plan_batch([padded], 2, seams=(40, 60)), States(False, True), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_cut_pieces_may_be_longer_than_a_chunk(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    compare(monkeypatch, kind, plan_batch([Documents.from_lengths([1, 270])], 2, "head_tail"), States(True))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_goes_through_the_state_where_nothing_keeps_it_apart(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    padded = Documents(np.array([3, 20]), np.array([11, 5]), 31)
    compare(monkeypatch, kind, plan_batch([padded], 2, "head_tail"), States(False))
    compare(monkeypatch, kind, plan_batch([padded], 2, "head_tail"), States(True))


def any_plan(data: st.DataObject, lengths: list[int]) -> BatchPlan:
    """A row of documents of these lengths, and perhaps padding, in any pieces in any order on one to four ranks."""
    total = sum(lengths) + data.draw(st.integers(0, 5)) or 1
    ranks = data.draw(st.integers(1, 4))
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=9))})
    order = data.draw(st.permutations(range(len(cuts) - 1)))
    parts: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for i in order:
        mine = parts[data.draw(st.integers(0, ranks - 1))]
        if mine and mine[-1][1] == cuts[i]:
            mine[-1] = (mine[-1][0], cuts[i + 1])
        else:
            mine.append((cuts[i], cuts[i + 1]))
    intervals = tuple(np.array(part, dtype=np.int64).reshape(-1, 2) for part in parts)
    return BatchPlan((Documents.from_lengths(lengths, total),), (TokenOrder(total, intervals, 3),), ranks)


@drawn(60, 12)
@given(data=st.data())
def test_any_order_of_any_pieces(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.sampled_from([0, 1, 2, 7, 13, 64, 67, 131]), min_size=1, max_size=5))
    plan = any_plan(data, lengths)
    read = States(data.draw(st.booleans()), True)
    if sum(lengths):
        kind = data.draw(st.sampled_from(KINDS))
        with pytest.MonkeyPatch.context() as patch:
            compare(patch, kind, plan, read, data.draw(st.integers(0, 9)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_documents(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    lengths = np.random.default_rng(0).integers(0, 4, 1000)
    compare(monkeypatch, kind, plan_batch([Documents.from_lengths(lengths)], 4), States(True))


@pytest.mark.parametrize("kind", KINDS)
def test_gloo_ranks_give_what_one_process_does(pool: Pool, kind: str) -> None:
    rows = [Documents.from_lengths([5, 90, 1, 12], 111)]
    for read in (States(True), States(False, True)):
        results = pool.run(3, _gloo, kind, rows, read)
        plan, inputs, dout = _problem(kind, rows, 3, read)
        check(kind, plan, read, [(out, grads) for out, grads in results], inputs, dout)


def _problem(kind: str, rows: list[Documents], ranks: int, read: States) -> tuple[BatchPlan, list[Tensor], Tensor]:
    plan, inputs = plan_batch(rows, ranks, "dual_chunk"), inputs_of(kind, len(rows), rows[0].total)
    like = expected_of(kind, plan, read, inputs)
    return plan, inputs, torch.randn(like.shape, dtype=like.dtype, generator=torch.Generator().manual_seed(1))


def _gloo(mesh: DeviceMesh, kind: str, rows: list[Documents], read: States) -> tuple[Tensor, list[Tensor]]:
    plan, inputs, dout = _problem(kind, rows, mesh.size(), read)
    return on_rank(kind, plan, read, inputs, dout, mesh.get_group().group_name, mesh.get_rank())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ops_pass_opcheck(kind: str) -> None:
    plan = plan_batch([Documents.from_lengths([4, 5])], 1, options=LayoutOptions())
    inputs = [x.requires_grad_() for x in inputs_of(kind, 1, 9, dtype=torch.bfloat16)]
    tables = tables_of(plan, States(True), 0)
    opcheck(getattr(ops, f"{kind}_on_pieces").default, (*inputs, tables, *options_of(kind), ""))
