"""Where on the way to keys and values rows are exchanged: at the cheapest cut, and nowhere that is not proven."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import cp_rewrite as cp
from cp_rewrite.diagnose.explain import Report
from cp_rewrite.ops.exchange import halves, padded_columns
from cp_rewrite.planning.cost.devices import DEVICES
from tests.end_to_end.test_end_to_end import TOKENS, make_batch
from tests.helpers.latent import (
    HEADS,
    NOPE,
    RANK,
    ROPE,
    WIDTH,
    Autocast,
    Averaged,
    Checkpointed,
    Dropped,
    FromQueries,
    Latent,
    LatentModel,
    Mixed,
    V,
    Written,
)
from tests.helpers.models import Tiny
from tests.helpers.packed import make_schedule, tensors

ops: Any = torch.ops.cp_rewrite
SHARDING = cp.Sharding(4, TOKENS, cp.PositionIds("position_ids"), exchange="needed", exchange_at="narrowest")
KEYS = 4 * HEADS * (NOPE + ROPE)
CUT = 4 * (RANK + ROPE)
SLOW_LINK = replace(DEVICES["h200"], link=1e7, ring=1e7, all_to_all=1e7, latency=1e-9)


def report_of(model: Callable[..., Any], sharding: cp.Sharding = SHARDING, lengths: Any = ((13, 20, 31),)) -> Report:
    torch._dynamo.reset()
    return cp.explain(model, sharding, shift_labels=True)(**make_batch([list(row) for row in lengths]))


def travels(report: Report) -> list[int | None]:
    """Bytes of a token that each site exchanges; None: keys and values."""
    assert report.ok, report
    found: list[int | None] = []
    for site in report.sites:
        words = next((why.split() for why in site.why if " travel, " in why), None)
        found.append(None if words is None else int(words[words.index("travel,") + 1]))
    return found


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (Latent, CUT),
        # Values behind the convolution, and what keys are made of.
        pytest.param(Mixed, CUT + 4 * HEADS * V, marks=pytest.mark.slow),
        pytest.param(Dropped, KEYS + 4 * RANK, marks=pytest.mark.slow),
        pytest.param(Averaged, None, marks=pytest.mark.slow),  # keys of which nothing is this rank's alone
        pytest.param(Written, CUT, marks=pytest.mark.slow),
        pytest.param(FromQueries, 4 * (WIDTH + ROPE // 2), marks=pytest.mark.slow),  # hidden states, and angles
    ],
)
def test_no_more_is_computed_again_than_is_proven(layer: type[Latent], expected: int | None) -> None:
    sharding = replace(SHARDING, random="per_rank")
    assert travels(report_of(LatentModel(layer, 1), sharding)) == [expected]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "expected"), [(Checkpointed, CUT), (Autocast, 2 * (RANK + 2 * ROPE))])
def test_regions_and_autocast(model: type[LatentModel], expected: int) -> None:
    """Under autocast rotary keys are of fp32, latents of bf16."""
    assert travels(report_of(model(layers=1))) == [expected]


@pytest.mark.slow
def test_rows_of_the_batch_beside_each_other_stay() -> None:
    assert travels(report_of(LatentModel(layers=1), lengths=((13, 20, 31), (40, 24)))) == [None]


def test_auto_moves_what_gains() -> None:
    """Latents, where the link is slow; no keys and values that are as narrow as what they are made of."""
    slow = replace(SHARDING, exchange="auto", exchange_at="auto", speeds=SLOW_LINK)
    assert travels(report_of(LatentModel(layers=1), slow)) == [CUT]
    assert travels(report_of(Tiny(), slow)) == [None]
    by_heads = report_of(LatentModel(layers=1), replace(slow, speeds=replace(SLOW_LINK, all_to_all=2e7)))
    assert travels(by_heads) == [CUT]
    assert by_heads.sites[0].why[0] == "needed: for rows that are narrower than keys and values"


CAPTURED = {"exchange": "all_gather", "capacity": cp.Capacity(8, 8, 64)}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"exchange": "p2p"}, {"exchange": "a2a"}, CAPTURED])
def test_what_can_not_be_moved_is_refused(options: dict[str, Any]) -> None:
    sharding = replace(SHARDING, **options)
    assert [refusal.reason for refusal in report_of(Tiny(), sharding).refusals] == [cp.Reason.EXCHANGE]
    assert report_of(Tiny(), replace(sharding, exchange_at="auto")).ok


@pytest.mark.slow
def test_the_new_ops_pass_opcheck() -> None:
    schedule, _ = make_schedule([cp.Documents.from_lengths([5, 0, 7, 1], 15)], 1, "contiguous", cp.PackedMask())
    tables, route = tensors(schedule, 0, "local")
    q, k, v = (torch.randn(n, h, d, requires_grad=True) for n, h, d in ((15, 4, 8), (13, 2, 8), (13, 2, 6)))
    for sinks in (None, torch.randn(4, requires_grad=True)):
        numbers = (0.3, 0.0, "reference", False)
        torch.library.opcheck(ops.gathered_attention.default, (q, k, v, *tables, *numbers, sinks))
    rows = torch.randn(15, 7, requires_grad=True)
    torch.library.opcheck(ops.exchange_tokens.default, (rows, tables[2], route, "local", "", 1))


@pytest.mark.parametrize(("columns", "item_bytes"), [(1, 4), (8, 2), (576, 2), (10, 4), (63, 2)])
def test_parts_of_rows_are_whole_chunks(columns: int, item_bytes: int) -> None:
    padded = padded_columns(columns, item_bytes)
    parts = halves(torch.zeros(3, padded, dtype={2: torch.bfloat16, 4: torch.float32}[item_bytes]))
    assert columns <= padded < columns + 32 // item_bytes
    assert all(part.shape[2] and part.shape[2] * item_bytes % 16 == 0 for part in parts)
    assert torch.cat(parts, 2).shape == (3, 1, padded)
