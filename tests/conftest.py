from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

# Of symbolic shapes, which most tests have, torch's cache of fake results remembers little and costs half of all time.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers import amount

if TYPE_CHECKING:  # torch is not for the process that only hands out tests
    from tests.helpers.pool import Pool


def pytest_configure(config: pytest.Config) -> None:
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):  # before torch is imported
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    chosen: str = config.option.markexpr
    amount.begin()
    amount.everything = "not slow" not in chosen and "not sweep" not in chosen
    # What pytest-xdist's workers must know too: a file that is named runs all cases of its shared tests.
    os.environ["CP_SEED"] = str(amount.seed())
    if not hasattr(config, "workerinput"):
        os.environ["CP_NAMED"] = str(config.args_source == pytest.Config.ArgsSource.ARGS)
    # Examples that compile or talk to other processes have no steady duration.
    options = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
    settings.register_profile("default", max_examples=amount.examples(100), **options)  # type: ignore[arg-type]
    settings.load_profile("default")


def pytest_sessionstart(session: pytest.Session) -> None:
    terminal: Any = session.config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None and "not slow" not in session.config.option.markexpr:
        terminal.write_line(f"slow tests are drawn with CP_SEED={amount.seed()}")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks, and before what is left out is
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests with a pool run on one worker: one pool serves them all, one server forks all processes. Those that
    users' trainers rest on, and break first, run first. Of a shared test the cases of other days are slow; of many slow
    cases of a test some are for `make sweep`."""
    slow: dict[str, list[pytest.Item]] = {}
    shared: dict[str, list[pytest.Item]] = {}
    for item in items:
        if {"pool", "pair"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("pool"))
            item.add_marker("long")
        if item.get_closest_marker("shared") is not None:
            shared.setdefault(item.nodeid.partition("[")[0], []).append(item)
    if os.environ["CP_NAMED"] == "False":
        for cases in shared.values():
            for item in {*cases} - {*amount.share(cases)}:
                item.add_marker("slow")
    for item in items:
        if item.get_closest_marker("slow") is not None:
            slow.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in slow.values():
        for item in {*cases} - {*amount.some(cases)}:
            item.add_marker("sweep")
    places = amount.order({str(item.path) for item in items})
    items.sort(key=lambda item: ("integrations" not in item.path.parts, places[str(item.path)]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if amount.is_over() and item.get_closest_marker("slow") is not None:
        pytest.skip("the minutes of this run are over: another day's order has it earlier")


def pytest_collection_finish() -> None:
    """Dynamo makes much garbage: a collection need not look at all modules each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    if "torch" in sys.modules:
        from tests.helpers.untimed import leave_guards_untimed

        leave_guards_untimed()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo processes."""
    from tests.helpers.pool import Pool

    processes = Pool(4)
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """How many of a file's mutants ended how, which is printed at the end."""
    counts: Counter[str] = Counter()
    yield counts
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{counts.total()} mutants of {request.path.stem}: {dict(counts)}")
