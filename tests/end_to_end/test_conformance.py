"""Every exchange, mask, padding and shape against fp64; the whole sweep writes docs/generated/conformance.md."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cp_rewrite import Reason
from cp_rewrite.documents import Documents
from cp_rewrite.kernels.select import Params
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.routes.by_exchange import Exchange
from tests.helpers import amount
from tests.helpers.conformance import errors, limit, run_cells
from tests.helpers.conformance_cells import EXCHANGES, HEADER, MASKS, PACKS, TE_HOLES, Cell, cells, uncovered_pairs
from tests.helpers.pool import Pool
from tests.helpers.refused_cells import REFUSED, Refused, refusal_lines, refusals_of

TABLE = Path(__file__).parent.parent.parent / "docs" / "generated" / "conformance.md"


def worst_errors(pool: Pool, cases: list[Cell]) -> dict[Cell, float]:
    """The worst relative error of each cell, over its results."""
    found: dict[Cell, float] = {}
    for ranks, group in itertools.groupby(sorted(cases, key=lambda c: c.world_size), lambda c: c.world_size):
        batch = list(group)
        for cell, *parts in zip(batch, *pool.run(ranks, run_cells, batch), strict=True):
            found[cell] = max(error for _, error in errors(cell, parts))
    return found


def failures(found: dict[Cell, float]) -> list[str]:
    return [f"{cell}: {error:.1e}" for cell, error in found.items() if not error <= limit(cell)]


def test_any_two_values_meet() -> None:
    assert not uncovered_pairs([cell for cell in cells() if cell.padding in PACKS])


@pytest.mark.long
@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refusals_name_their_reason(case: Refused) -> None:
    found = {refusal.reason for refusal in refusals_of(case)}
    # Attention that is not rewritten mixes tokens: that is said too.
    assert case.reason in found
    assert found <= {case.reason, Reason.TOKEN_MIXING}


def test_a_sample_of_cells(pool: Pool) -> None:
    """Not TransformerEngine's, but for some with few heads: those take long."""
    sample = [cell for cell in cells() if cell.padding in PACKS][::97]
    sample += [cell for cell in cells() if cell.heads == (12, 2) and cell.padding not in PACKS][::20]
    assert not failures(worst_errors(pool, sample))


def test_a_rank_without_rounds_is_asked_for_its_largest_logits(pool: Pool) -> None:
    """The exchange is the ring; the rank's rows are padding alone."""
    (cell,) = [
        cell for cell in cells()
        if (cell.exchange, cell.layout, cell.padding, cell.world_size) == ("p2p", "contiguous", "tail", 3)
    ][:1]  # fmt: skip
    assert not failures(worst_errors(pool, [cell]))


@pytest.mark.slow
def test_drawn_cells(pool: Pool) -> None:
    assert not failures(worst_errors(pool, random.Random(amount.seed()).sample(cells(), 200)))


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_all_cells_and_write_the_table(pool: Pool) -> None:
    found: dict[Cell, float] = {}
    everything = cells()
    for at in range(0, len(everything), 100):
        found |= worst_errors(pool, everything[at : at + 100])
    write_table(found)
    assert not failures(found)


def write_table(found: dict[Cell, float]) -> None:
    """The sweep as Markdown: a summary per exchange, then every cell."""
    lines = [
        "# Conformance",
        "",
        "Written by `pytest -m sweep tests/end_to_end/test_conformance.py`. Each cell ran on gloo processes with the",
        "`reference` kernel, NaN in every padding row of q, k, v and the output's gradient: output and all gradients",
        "against dense attention in fp64 (worst relative norm), exact zeros in gradients of padding, two runs bitwise",
        "equal.",
        "",
        "LSE and largest logits per head are compared in every cell too.",
        "",
        "| exchange | cells | pass |",
        "| --- | --- | --- |",
        *(_counts(name, found, lambda cell, name=name: cell.exchange == name) for name in EXCHANGES),
        "",
        "| mask | cells | pass |",
        "| --- | --- | --- |",
        *(_counts(str(mask), found, lambda cell, mask=mask: cell.mask == mask) for mask in MASKS),
        "",
        "What TransformerEngine raises on, leaves out or gets wrong. Also: more than 12,287 documents",
        "(`tests/end_to_end/test_long_rows.py`), and every model test, which runs inside one compiled graph.",
        "",
        "| case | cells | pass |",
        "| --- | --- | --- |",
        *(_counts(name, found, of) for name, of in TE_HOLES.items()),
        "",
        "Refused:",
        "",
        *refusal_lines(),
        "",
        f"| {HEADER} | error | |",
        "| " + " | ".join(["---"] * (HEADER.count("|") + 3)) + " |",
        *(f"| {cell} | {error:.0e} | {'pass' if error <= limit(cell) else 'FAIL'} |" for cell, error in found.items()),
    ]
    TABLE.write_text("\n".join(lines) + "\n")


def _counts(name: str, found: dict[Cell, float], of: Callable[[Cell], bool]) -> str:
    passes = [error <= limit(cell) for cell, error in found.items() if of(cell)]
    return f"| {name} | {len(passes)} | {sum(passes)} |"


def test_every_hole_has_cells() -> None:
    assert all(sum(map(of, cells())) >= 10 for of in TE_HOLES.values())


def test_memory_grows_with_tokens_not_their_square() -> None:
    """Peak memory of the reference, causal over documents, up to 64K tokens."""
    peaks = {tokens: reference_peak(tokens) for tokens in (16384, 65536)}
    assert peaks[65536] < 4.5 * peaks[16384]


def reference_peak(tokens: int) -> float:
    """Bytes that the reference's tensors hold at most, as torch's profiler of allocations counts them."""
    from tests.helpers.packed import make_schedule, run_rank

    rows = [Documents.from_lengths([256] * (tokens // 256))]
    schedule = make_schedule(rows, 1, "contiguous", PackedMask())[0]
    q, k, v = (torch.randn(tokens, 1, 8) for _ in range(3))
    with torch.profiler.profile(profile_memory=True) as profile:
        run_rank(q, k, v, schedule, 0, Exchange("local", "", 1), Params(0.3))
    held = peak = 0
    profiler: Any = profile.profiler
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return float(peak)
