from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

# Of symbolic shapes, which most tests have, torch's cache of fake results remembers little and costs half of all time.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers import amount

LEFT_TO_TEST_ALL = frozenset(
    {
        "test_a_changed_backward_is_no_stale_hit",
        "test_a_killed_rank_is_named_and_the_other_ends[exchange]",
        "test_attention_is_found_and_right_wherever_it_hides[checkpointed-aot_eager]",
        "test_attention_is_found_and_right_wherever_it_hides[nested, only attention-aot_eager]",
        "test_true_masks_pass[gemma2_flex]",
        "test_a_wrong_reading_of_a_mask_raises[whole row & causal-torchtitan]",
        "test_a_wrong_reading_of_a_mask_raises[same document & causal & window (5, 0)-torchtitan]",
        "test_lists_of_blocks_are_compared_on_the_first_call[as_is]",
        "test_lists_of_blocks_are_compared_on_the_first_call[whole_blocks]",
        "test_gradients_equal_one_process[fsdp by blocks]",
        "test_gradients_equal_one_process[ddp]",
        "test_outside_of_batches",
        "test_sums_are_those_of_one_process[2]",
        "test_two_processes_match_one[2-window2-a2a]",
        "test_every_exchange[a2a+p2p-same document & causal & window (1, 0)]",
        "test_every_exchange[a2a+all_gather-same document & causal & window (1, 0)]",
        "test_transformers_models_are_proven[Mistral-True]",
        "test_transformers_models_are_proven[Mistral-False]",
        "test_transformers_models_are_proven[Mixtral-False]",
        "test_transformers_packed[Mistral-options1-expected1-True]",
    }
)
"""Tests of seconds, beside which faster ones look at the same code."""

if TYPE_CHECKING:  # torch is not for the process that only hands out tests
    from tests.helpers.pool import Pool


def pytest_configure(config: pytest.Config) -> None:
    amount.everything = "not slow" not in config.option.markexpr
    # Examples that compile or talk to other processes have no steady duration.
    options = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
    settings.register_profile("default", max_examples=amount.examples(100), **options)  # type: ignore[arg-type]
    settings.load_profile("default")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests with a pool run on one worker: one pool serves them all, one server forks all processes."""
    for item in items:
        if item.name in LEFT_TO_TEST_ALL:
            item.add_marker("slow")
        if {"pool", "pair"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("pool"))
            item.add_marker("long")


def pytest_collection_finish() -> None:
    """Dynamo makes much garbage: a collection need not look at all modules each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo processes."""
    from tests.helpers.pool import Pool

    processes = Pool(4)
    yield processes
    processes.close()
