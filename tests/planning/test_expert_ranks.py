"""How many ranks share a set of experts, by the cost model: beside what was measured, and case by case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cp_rewrite.planning.cost.constants import TOKENS_PER_RANK
from cp_rewrite.planning.cost.devices import DEVICES
from cp_rewrite.planning.cost.experts import Machine, Mixture, choose_ranks, faster_up_to, seconds_of

H200 = DEVICES["h200"]


def mixture(C: int, F: int, experts: int, chosen: int, dense: int, layers: int = 4, grad_bytes: int = 2) -> Mixture:
    """In bf16, `dense` parameters a layer beside the experts'."""
    weights = 3 * experts * C * F * layers
    flops = 6 * layers * (chosen * 3 * C * F + dense)
    return Mixture(layers, chosen, 4, 2 * 2 * weights, grad_bytes * weights, 2 * C * layers, flops)


QWEN3 = mixture(2048, 768, 128, 8, 18_900_000)
GPT_OSS = mixture(2880, 2880, 128, 4, 35_000_000)
TINY = mixture(64, 32, 8, 2, 20_000)

MEASURED = {4096: (58.1, 56.2), 16_384: (109.4, 89.1), 32_768: (203.0, 180.9)}
"""Tokens a GPU -> ms of a step with FSDP alone and with two ranks that share, 2 H200, the widths of `QWEN3`."""


@pytest.mark.parametrize("tokens", MEASURED)
def test_two_gpus_share_as_was_measured(tokens: int) -> None:
    alone, shared = MEASURED[tokens]
    assert shared < alone
    assert choose_ranks(QWEN3, Machine(2, 2, H200), [2], tokens) == 2
    saved = [fixed + tokens * each for fixed, each in (seconds_of(QWEN3, Machine(2, 2, H200), n) for n in (1, 2))]
    if tokens >= 16_384:  # with fewer the host is the limit
        assert 0.6 < 1e3 * (saved[0] - saved[1]) / (alone - shared) < 1.1


CASES: dict[str, tuple[Mixture, int, int, list[int], int | None, int]] = {
    # ranks, ranks of a node, sizes that are possible, tokens -> ranks that share
    "any number of tokens": (QWEN3, 2, 2, [2], None, 2),
    "very many tokens": (QWEN3, 2, 2, [2], 1 << 18, 1),
    "few tokens": (QWEN3, 8, 8, [2, 4, 8], 2048, 8),
    "more tokens": (QWEN3, 8, 8, [2, 4, 8], 24_576, 4),
    "many tokens": (QWEN3, 8, 8, [2, 4, 8], 32_768, 2),
    "all or none": (QWEN3, 8, 8, [8], None, 8),
    "all or none, many tokens": (QWEN3, 8, 8, [8], 65_536, 1),
    "wide experts": (GPT_OSS, 8, 8, [2, 4, 8], None, 8),
    "two nodes": (GPT_OSS, 16, 8, [2, 4, 8, 16], 4096, 8),
    "two nodes, all or none": (GPT_OSS, 16, 8, [16], 4096, 1),
    "6 experts over 4 ranks": (GPT_OSS, 4, 4, [2], 4096, 2),
    "6 experts over 4 ranks, all or none": (GPT_OSS, 4, 4, [], 4096, 1),
    "narrow experts": (TINY, 8, 8, [2, 4, 8], None, 1),
    "none": (replace(QWEN3, layers=0, gathered=0, summed=0, row=0.0), 8, 8, [], None, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_cases(case: str) -> None:
    given, ranks, node, sizes, tokens, expected = CASES[case]
    assert choose_ranks(given, Machine(ranks, node, H200), sizes, tokens) == expected


def test_ranks_of_two_nodes_share_none() -> None:
    """4 of 6 on a node: the second group would be on both. Adapters that take no time don't change that."""
    machine = Machine(12, 6, replace(H200, node_link=1e15))
    assert choose_ranks(GPT_OSS, machine, [2, 4], 4096) == 2
    assert choose_ranks(GPT_OSS, replace(machine, node=4), [2, 4], 4096) == 4


@pytest.mark.parametrize(
    ("least", "expected"),
    [(1, 2), (8, 8), (16, 16), (32, 32), (64, 8)],
    ids=["free", "all of a node", "two nodes", "four nodes", "nothing is enough"],
)
def test_nodes_share_only_what_does_not_fit_otherwise(least: int, expected: int) -> None:
    """`least`: the fewest ranks that fit."""
    assert choose_ranks(QWEN3, Machine(32, 8, H200), [2, 4, 8, 16, 32], 16_384, lambda n: n >= least) == expected


@pytest.mark.parametrize("machine", [Machine(2, 2, H200), Machine(8, 8, H200), Machine(16, 8, H200)])
@pytest.mark.parametrize("given", [QWEN3, GPT_OSS, TINY])
def test_no_other_number_loses_less_at_its_worst(given: Mixture, machine: Machine) -> None:
    sizes = [n for n in (2, 4, 8) if n <= machine.ranks]
    tokens = [TOKENS_PER_RANK * 2**i for i in range(24)]

    def worst(n: int) -> float:
        at: dict[int, dict[int, Any]] = {}
        for T in tokens:
            at[T] = {m: fixed + T * each for m in (1, *sizes) for fixed, each in (seconds_of(given, machine, m),)}
        return max(found[n] / min(found.values()) for found in at.values())

    chosen = choose_ranks(given, machine, sizes)
    assert worst(chosen) <= min(map(worst, (1, *sizes))) + 1e-3


def test_the_number_of_tokens_up_to_which_it_is_faster() -> None:
    machine = Machine(4, 4, H200)
    for n in (2, 4):
        up_to = faster_up_to(QWEN3, machine, n)
        for tokens, better in ((up_to - 1, n), (up_to + 2, 1)):
            assert choose_ranks(QWEN3, machine, [n], tokens) == better
    assert faster_up_to(TINY, machine, 4) == 0
    assert faster_up_to(QWEN3, Machine(16, 8, H200), 16) < faster_up_to(QWEN3, Machine(16, 16, H200), 16) / 2


def test_gradients_and_checkpoints_count() -> None:
    """Frozen experts are gathered alone; rows of checkpointed layers travel once more."""
    machine = Machine(2, 2, H200)
    least = faster_up_to(QWEN3, machine, 2)
    assert faster_up_to(replace(QWEN3, summed=0), machine, 2) == pytest.approx(2 / 3 * least, rel=0.02)
    assert faster_up_to(replace(QWEN3, trips=6), machine, 2) == pytest.approx(2 / 3 * least, rel=0.02)
