"""Running sums over the tokens of a row: one process's loss and gradients, on any rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.border.model import TOKENS, WIDTH, Model
from tests.helpers.pool import Pool

Batch = Mapping[str, Any]
Mix = Callable[[Any, Tensor, Batch], Tensor]


def chosen(m: Any, h: Tensor) -> Tensor:
    """(B, T) the expert of each token."""
    return (h @ m.router).argmax(-1)


def dispatched(m: Any, h: Tensor, b: Batch) -> Tensor:
    """Experts take the first tokens of the batch that choose them, as Switch Transformers do."""
    mask = F.one_hot(chosen(m, h).flatten(), 4)
    place = (mask.cumsum(0) * mask).sum(-1)
    return h * (place <= 4).view(h.shape[:2])[..., None]


def since_start(m: Any, h: Tensor, b: Batch) -> Tensor:
    """A running sum that begins anew at each document: of what is not negative, so that sums only grow."""
    x = h.square()
    total = x.cumsum(1)
    starts = (b["position_ids"] == 0)[..., None]
    return total - torch.where(starts, total - x, 0.0).cummax(1).values


def since_picked_start(m: Any, h: Tensor, b: Batch) -> Tensor:
    """The same by the running sum before each document, read at places that all ranks have."""
    before = (h.cumsum(1) - h).gather(1, b["starts"][..., None].expand(-1, -1, h.shape[-1]))
    return h.cumsum(1) - before.gather(1, b["doc_ids"][..., None].expand_as(h))


def discounted(h: Tensor, b: Batch) -> Tensor:
    """Discounted sums of what follows, as returns of reinforcement learning."""
    weight = 0.9 ** torch.arange(h.shape[1]).to(h.dtype)[:, None]
    return (h * weight).flip(1).cumsum(1).flip(1) / weight


MIXES: dict[str, Mix] = {
    "cumsum": lambda m, h, b: h.cumsum(1),
    "cumsum_of_features_first": lambda m, h, b: h.mT.cumsum(-1, dtype=h.dtype).mT,
    "exclusive": lambda m, h, b: h.cumsum(1) - h,
    "reversed": lambda m, h, b: h.sum(1, keepdim=True) - h.cumsum(1) + h,
    "from_behind": lambda m, h, b: h.flip(1).cumsum(1).flip(1),
    "returns": lambda m, h, b: discounted(h, b),
    "mean_so_far": lambda m, h, b: h.cumsum(1) / (torch.arange(h.shape[1]) + 1)[:, None],
    "joined": lambda m, h, b: h.flatten(0, 1).cumsum(0).view_as(h),
    "cumprod": lambda m, h, b: (h * 0.2 + 1).cumprod(1),
    "cumprod_of_zeros": lambda m, h, b: (
        (h + 1).relu().cumprod(1) + ((b["position_ids"] != 2)[..., None] * h).cumprod(1)
    ),
    "logcumsumexp": lambda m, h, b: h.logcumsumexp(1),
    "cummax": lambda m, h, b: h.cummax(1).values - h.cummin(1).values,
    "of_equal_ones": lambda m, h, b: (m.embed(b["input_ids"] % 3) * h.detach().round()).cummax(1).values,
    "cummax_places": lambda m, h, b: h * h.round().cummax(1).indices + h * h.round().cummin(1)[1],
    "joined_places": lambda m, h, b: h * h.round().flatten(0, 1).cummax(0).indices.view_as(h),
    "since_start": since_start,
    "less_that_of_starts": since_picked_start,
    "dispatched": dispatched,
    "counted": lambda m, h, b: h + m.embed((b["input_ids"] == 3).cumsum(1)),
    "positions": lambda m, h, b: h * (torch.ones_like(b["doc_ids"]).cumsum(1) - 1)[..., None],
    "row_and_feature": lambda m, h, b: (h[..., 0].cumsum(1) * h[..., 1].cumsum(1))[..., None].expand_as(h),
    "in_a_step": lambda m, h, b: (h.cumsum(1).tanh() * h).cumsum(1),
    "without_gradient": lambda m, h, b: h * h.detach().cumsum(1).tanh(),
}


def model_of(names: Sequence[str]) -> Model:
    def mix(m: Any, h: Tensor, b: Batch) -> Tensor:
        return h + sum((0.1 + 0.02 * i) * MIXES[name](m, h, b) for i, name in enumerate(names))

    def extra(m: Any) -> None:
        m.router = torch.nn.Parameter(torch.randn(WIDTH, 4), requires_grad=False)

    return Model(mix=mix, extra=extra)


def packed(rows: int, tokens: int) -> dict[str, Any]:
    """(B, T) rows of three documents each, in each row of other lengths, or of fewer where it is short."""
    generator = torch.Generator().manual_seed(rows + tokens)
    cuts = [sorted({0, min(2 + i, tokens), min(6 + i, tokens), tokens}) for i in range(rows)]
    lengths = [torch.tensor(row).diff() for row in cuts]
    labels = torch.randint(0, 19, (rows, tokens), generator=generator)
    return {
        "input_ids": torch.randint(0, 19, (rows, tokens), generator=generator),
        "doc_ids": torch.stack([torch.repeat_interleave(torch.arange(len(n)), n) for n in lengths]),
        "position_ids": torch.stack([torch.cat([torch.arange(int(k)) for k in n]) for n in lengths]),
        "starts": torch.stack([F.pad((n.cumsum(0) - n), (0, 3 - len(n))) for n in lengths]),
        "labels": labels,
        "num_items": torch.tensor(float(labels.numel())),
    }


def step(model: Callable[..., Tensor], batch: Batch) -> float:
    loss = model(**batch)
    loss.backward()
    return loss.item()


def sharded_step(
    mesh: DeviceMesh, names: Sequence[str], batches: Sequence[Batch], layout: Any, dtype: torch.dtype
) -> list[tuple[float, dict[str, Any]]]:
    tokens = {**TOKENS, "position_ids": 1}
    sharding = cp.Sharding(mesh, tokens, cp.DocumentIds("doc_ids"), layout, "all_gather", inner="aot_eager")
    torch._dynamo.reset()
    model = model_of(names).to(dtype)
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    found: list[tuple[float, dict[str, Any]]] = []
    for batch in batches:
        model.zero_grad()
        with sharding.shard(batch) as local:
            loss = step(compiled, local)
        cp.sum_gradients(model.parameters(), sharding)
        grads = {key: p.grad.double().numpy() for key, p in model.named_parameters() if p.grad is not None}
        found.append((loss, grads))
    return found


def compare(
    pool: Pool,
    names: Sequence[str],
    ranks: int,
    layout: str,
    sizes: Sequence[tuple[int, int]],
    dtype: torch.dtype = torch.float64,
) -> None:
    """`sizes`: (rows, tokens) of batches that follow each other."""
    batches = [packed(*size) for size in sizes]
    results = pool.run(ranks, sharded_step, names, batches, layout, dtype)
    limit = 1e-7 if dtype is torch.float64 else 1e-5
    for i, batch in enumerate(batches):
        model = model_of(names).to(dtype)
        expected = step(model, batch)
        assert sum(rank[i][0] for rank in results) == pytest.approx(expected, rel=limit)
        for key, p in model.named_parameters():
            if p.grad is not None:
                error = (torch.from_numpy(results[0][i][1][key]) - p.grad.double()).norm()
                assert error <= limit * p.grad.double().norm(), f"{key}: {error}, of batch {i}"


def test_running_sums_are_those_of_the_row(pool: Pool) -> None:
    compare(pool, ["cumsum"], 2, "balanced", [(1, 13)])


def test_many_running_sums_are_those_of_the_row() -> None:
    names = ["of_equal_ones", "cumprod", "from_behind", "logcumsumexp", "since_start", "dispatched"]
    sharding = cp.Sharding(2, {**TOKENS, "position_ids": 1}, cp.DocumentIds("doc_ids"), "dual_chunk")
    torch._dynamo.reset()
    report = cp.check(model_of(names).double(), sharding, packed(2, 13))
    assert report.largest <= 1e-9, str(report)


def test_the_report_names_what_is_exchanged_and_its_bytes() -> None:
    model, batch = model_of(["cumsum"]), packed(1, 14)
    (found,) = cp.explain(model, cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), "contiguous"))(**batch).collectives
    assert (found.op, found.bytes) == ("rows_of_ranks", 2 * WIDTH * 4)  # a rank has one piece, of two at least
    assert "h.cumsum(1)" in found.where
    assert found.why.startswith("cumsum over the row")
    sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), resolve=False)
    refused = cp.explain(model, sharding)(**batch).refusals
    assert {refusal.reason for refusal in refused} == {cp.Reason.TOKEN_MIXING}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout", "sizes", "dtype"),
    [
        (2, "balanced", [(2, 13), (2, 14)], torch.float64),
        (3, "contiguous", [(2, 14), (2, 7)], torch.float64),
        (4, "dual_chunk", [(1, 15), (1, 7), (1, 3)], torch.float64),
        (4, "head_tail", [(2, 13)], torch.float32),
        (3, "balanced", [(3, 14)], torch.float32),
    ],
)
def test_running_sums_on_more_ranks(pool: Pool, ranks: int, layout: str, sizes: Any, dtype: torch.dtype) -> None:
    compare(pool, [*MIXES][(2 * ranks + len(sizes)) % 3 :: 3], ranks, layout, sizes, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXES)
def test_each_running_sum_alone(pool: Pool, name: str) -> None:
    compare(pool, [name], 2, "dual_chunk", [(2, 13)])
