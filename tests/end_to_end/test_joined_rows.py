"""Rows of each rank's own, joined to one batch of all ranks, against one process that takes the same rows in turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import cp_rewrite as cp
from cp_rewrite.capacity import Capacity
from tests.helpers.models import build_model
from tests.helpers.one_process import assert_gradients
from tests.helpers.packed_model import PackedModel
from tests.helpers.pool import Pool

from .test_end_to_end import TOKENS, make_batch

LIMIT = 1e-5
Batch = dict[str, Tensor]
Rows = list[list[int]]
"""Documents of each row of one rank; its rows have one length."""
Recorded = list[tuple[list[float], dict[str, Tensor]]]
"""Losses of the micro-batches and all gradients, step by step."""
STEPS: list[list[list[Rows]]] = [
    [[[[13, 1, 7]], [[30, 3]], [[5, 3], [2, 6]], [[40]]], [[[8]], [[1, 1, 1, 9]], [[17]], []]],
    [[[[2]], [[70, 5]], [[6, 6, 6]], [[3, 4]]], [[], [], [[21, 2]], [[12], [12], [12]]]],
]
"""By step, micro-batch and rank. Rows of unequal length and number, also none."""
EVEN: list[list[list[Rows]]] = [
    [[[[13, 1, 7]], [[30, 3]], [[5, 3], [2, 6]], [[40]]]],
    [[[[50]], [], [[40]], [[10], [10]]]],
]
"""The same, 110 tokens of all ranks each."""


def make_rows(rows: Rows) -> Batch:
    """A rank's rows. Each token is a target of the one before it in its row; the first one of a row is of none."""
    batch = make_batch(rows) if rows else {}
    return {**batch, "labels": batch["input_ids"].clone()} if rows else {}


def targets(batches: Sequence[Batch]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches if batch)


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def train(
    model: nn.Module, take_step: Callable[[list[list[Rows]]], list[float]], steps: list[list[list[Rows]]] = STEPS
) -> Recorded:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    recorded: Recorded = []
    for step in steps:
        losses = take_step(step)
        named = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
        recorded.append((losses, {name: whole(grad) for name, grad in named.items() if grad is not None}))
        optimizer.step()
        optimizer.zero_grad()
    return recorded


def train_alone(steps: list[list[list[Rows]]] = STEPS) -> Recorded:
    """Every row of every rank by itself."""
    model: Any = build_model("llama")

    def take_step(step: list[list[Rows]]) -> list[float]:
        micros = [[make_rows(rows) for rows in micro if rows] for micro in step]
        count = targets([batch for micro in micros for batch in micro])
        losses: list[float] = []
        for micro in micros:
            found = [model(**batch, num_items_in_batch=torch.tensor(count)).loss for batch in micro]
            torch.stack(found).sum().backward()
            losses.append(sum(loss.item() for loss in found))
        return losses

    return train(model, take_step, steps)


def train_joined(mesh: DeviceMesh, kind: str, grid: bool = False, inner: Any = "eager", **options: Any) -> Recorded:
    """`grid`: one plan over a mesh of (dp, cp) = (2, 2)."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")) if grid else mesh
    sharding = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), rows="own", inner=inner, **options)
    plain: Any = build_model("llama")
    if kind == "plain":
        model, run = plain, torch.compile(plain, backend=cp.backend(sharding), fullgraph=True)
    else:
        model = run = cp.parallelize(plain, mesh, sharding, data_parallel=kind)  # type: ignore[arg-type]

    def take_step(step: list[list[Rows]]) -> list[float]:
        batches = [make_rows(micro[sharding.rank]) for micro in step]
        count, losses = torch.tensor(targets(batches)), list[float]()
        for batch in batches:
            with sharding.shard({**batch, "num_items_in_batch": count}, shift_labels=True) as local:
                loss: Tensor = run(**local).loss
                losses.append(sharding.whole(loss).item())
            loss.backward()
        if kind == "plain":
            cp.sum_gradients(model.parameters(), sharding)
        return losses

    return train(model, take_step, EVEN if sharding.capacity else STEPS)


def compare(expected: Recorded, found: Recorded) -> None:
    for (losses, grads), (their_losses, theirs) in zip(expected, found, strict=True):
        assert their_losses == pytest.approx(losses, rel=LIMIT)
        assert_gradients(theirs, grads, LIMIT)


@pytest.mark.parametrize(
    ("kind", "grid"),
    [("fsdp", False), *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in ("fsdp", "ddp", "plain"))],
)
def test_rows_of_four_ranks_equal_one_process(pool: Pool, kind: str, grid: bool) -> None:
    expected = train_alone()
    for found in pool.run(4, train_joined, kind, grid):
        compare(expected, found)


@pytest.mark.slow
def test_rows_of_four_ranks_in_buffers_of_fixed_sizes(pool: Pool) -> None:
    room: dict[str, Any] = {"capacity": Capacity(documents=32, pieces=40, rows=800)}
    expected = train_alone(EVEN)
    for found in pool.run(4, functools.partial(train_joined, **room), "plain"):
        compare(expected, found)


DOC_TOKENS = {"input_ids": 1, "position_ids": 1, "doc_ids": 1, "labels": 1}
PADDED: list[list[tuple[int, int]]] = [[(0, 9), (-1, 4), (1, 6)], [(7, 5), (-1, 2)], [(-1, 3), (9, 21)], [(12, 1)]]
"""By rank: ids and lengths of the runs of its row."""


def padded_row(runs: list[tuple[int, int]], count: int) -> dict[str, Any]:
    doc_ids = torch.cat([torch.full((n,), i) for i, n in runs])[None]
    positions = torch.cat([torch.arange(n) for _, n in runs])[None]
    ids = (positions * 7 + doc_ids) % 19
    labels = ids.roll(-1, 1).masked_fill(doc_ids < 0, -100)
    return {"input_ids": ids, "position_ids": positions, "doc_ids": doc_ids, "labels": labels, "num_items": count}


def padded_step(mesh: DeviceMesh) -> tuple[float, dict[str, Tensor]]:
    torch._dynamo.reset()
    sharding = cp.Sharding(mesh, DOC_TOKENS, cp.DocumentIds("doc_ids"), rows="own", inner="eager")
    model = PackedModel()
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(padded_row(PADDED[sharding.rank], 40)) as local:
        loss = compiled(**local)
        value = sharding.whole(loss).item()
    loss.backward()
    cp.sum_gradients(model.parameters(), sharding)
    return value, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_padding_within_rows(pool: Pool) -> None:
    model = PackedModel()
    loss = torch.stack([model(**padded_row(runs, 40)) for runs in PADDED]).sum()
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for value, found in pool.run(4, padded_step):
        compare([([loss.item()], expected)], [([value], found)])


def each_from_loaders(mesh: DeviceMesh) -> list[Any]:
    """Results of two ranks that cut batches which a thread joins: of loaders of unequal length, one that fails, and a
    loop that is left."""
    sharding = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), rows="own")
    mine = [make_rows([[n, 3]]) for n in ((5, 9, 4) if sharding.rank else (6, 2))]
    found: list[Any] = []
    for block, rows in zip(sharding.batches(mine, shift_labels=True), [*mine, {}][:3], strict=True):
        with block as local:
            ahead = dict(local)
        with sharding.shard(rows, shift_labels=True) as local:
            found.append(all(torch.equal(local[name], ahead[name]) for name in local))
    for block in sharding.batches(mine):  # joins others ahead of time, and is left
        with block as local:
            found.append(local.plan.rows[0].total)
        break

    def fails() -> Iterator[Batch]:
        yield mine[0]
        if sharding.rank:
            raise OSError("a file is gone")
        yield mine[1]

    try:
        for block in sharding.batches(fails()):
            with block:
                found.append("cut")
    except (OSError, RuntimeError) as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def test_a_thread_joins_rows_of_loaders(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(2, each_from_loaders)):
        *same, total, cut, error = found
        assert (same, total, cut) == ([True] * 3, 17, "cut")
        assert error.startswith("OSError: a file is gone" if rank else "RuntimeError: the rows of all ranks are one")
        assert "OSError: a file is gone" in error


def refused(mesh: DeviceMesh, case: str) -> str:
    packing = cp.EndOfDocument("input_ids", 63) if case == "seam" else cp.PositionIds("position_ids")
    sharding = cp.Sharding(mesh, TOKENS, packing, rows="own", inner="eager")
    batch, how, second = make_rows([[5, 3]]), dict[str, Any](), sharding.rank == 1
    if case == "dtype" and second:
        batch["labels"] = batch["labels"].int()
    if case == "missing" and second:
        del batch["labels"]
    if case == "lengths":
        how["lengths"] = [5, 3]
    if case == "inside":
        batch["position_ids"] += 2 * second
    if case == "count" and second:
        batch["num_items_in_batch"] = torch.tensor(3)
    if case == "flag":
        batch["use_cache"] = second  # type: ignore[assignment]
    if case == "none":
        batch = {}
    torch._dynamo.reset()
    run: Any = torch.compile(build_model("llama"), backend=cp.backend(sharding), fullgraph=True)
    try:
        with sharding.shard(batch, **how) as local:
            run(**local)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("case", "messages"),
    [
        ("dtype", ["ValueError: rows of all ranks are joined, and ['labels'] are of other kinds on rank 1"] * 2),
        ("missing", ["RuntimeError: the rows of all ranks are one batch, and some have none: rank 1", "KeyError"]),
        ("lengths", ["ValueError: lengths are for packing arguments on a GPU"] * 2),
        ("inside", ["ValueError: batch['position_ids']: position_ids jump to 2 at token 8"] * 2),
        ("seam", ["ValueError: rows of all ranks are joined to one, and in it the document at token 0 goes on"] * 2),
        ("count", ["ValueError: 'num_items_in_batch' is the sum over all ranks, and ranks [0] gave none"] * 2),
        ("flag", ["RuntimeError: cp_rewrite: ranks [1] of the group cut another batch"] * 2),
        ("none", ["ValueError: no rank of the group has rows"] * 2),
        ("shift", ["ValueError: the model shifts 'labels' over the joined row of all ranks"] * 2),
    ],
)
def test_what_does_not_go_together(pool: Pool, case: str, messages: list[str]) -> None:
    for found, message in zip(pool.run(2, refused, case), messages, strict=True):
        assert found.startswith(message), found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": cp.WholeRows()}, "its tokens tell documents apart"),
        ({"packing": cp.CuSeqlens("cu_seqlens")}, "its tokens tell documents apart"),
        ({"across_documents": True}, "go with rows='same'"),
        ({"masks": {"mask": cp.PackedMask()}}, "go with rows='same'"),
        ({"rows": "mine"}, "rows must be one of same, own"),
    ],
)
def test_annotations_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"packing": cp.PositionIds("position_ids"), "rows": "own", **options}
    with pytest.raises(ValueError, match=message):
        cp.Sharding(2, TOKENS, **given)


def test_rows_of_one_process_are_joined_too() -> None:
    """A dry run takes what it is given for all there is."""
    sharding = cp.Sharding(2, TOKENS, cp.PositionIds("position_ids"), rows="own")
    batch = make_rows([[5, 3], [2, 6]])
    with sharding.shard(batch, shift_labels=True) as local:
        assert local.plan.rows[0].lengths.tolist() == [5, 3, 2, 6]
        assert int(local["num_items_in_batch"]) == targets([batch]) == 14


@pytest.mark.parametrize("spans", [cp.Spans("types", value=1), cp.Spans("types")])
def test_spans_end_with_their_row(spans: cp.Spans) -> None:
    """Two rows of which the first ends with an image and the second begins with one."""
    rows, tokens = make_rows([[5, 3], [2, 6]]), {**TOKENS, "types": 1}
    types = torch.tensor([[0, 1, 1, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0, 0]])
    sharding = cp.Sharding(2, tokens, cp.PositionIds("position_ids"), spans=spans, rows="own")
    with sharding.shard({**rows, "types": types}) as local:
        (documents,) = local.plan.rows
        assert documents.spans is not None
        inside = documents.spans.inside(documents)
        assert (inside.starts.tolist(), inside.ends.tolist()) == ([1, 6, 8], [3, 8, 10])
