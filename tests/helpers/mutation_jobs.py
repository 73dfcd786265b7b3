"""Jobs of tests that run in copies of the tree, each in a process of its own. This file is a plugin of their pytest."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .source_mutants import Mutant

ROOT = Path(__file__).parent.parent.parent
TREE = ("cp_rewrite", "passes", "csrc", "tests", "examples", "docs")
POOL_WEIGHT = 3
"""Workers that a job with a process pool counts for."""


@dataclass(frozen=True)
class Job:
    """Tests of one folder that run in one process. seconds: what they took on the unchanged tree, 0 if unknown."""

    tests: tuple[str, ...]
    pool: bool
    seconds: float = 0.0

    @property
    def files(self) -> list[str]:
        return sorted({test.partition("::")[0] for test in self.tests})

    def odds(self, room: str) -> float:
        """How likely it kills a mutant of `room`, as long as nothing is known."""
        inside = any(room in file for file in self.files)
        folder = "passes" if room in ("predicate", "locality") else room
        return 0.6 if inside else 0.3 if any(f"/{folder}/" in file for file in self.files) else 0.1


@dataclass(eq=False)
class Run:
    """A job that runs in a copy of the tree. Its log is lines of this file's hooks."""

    job: Job
    tree: Path
    mutant: Mutant | None = None
    limit: float = 600.0
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        handle, name = tempfile.mkstemp(dir=self.tree)
        os.close(handle)
        self.log, chosen = Path(name), Path(f"{name}.chosen")
        chosen.write_text("\n".join(self.job.tests))
        stop = ["-x"] if self.mutant else []
        self.process = start_pytest(self.tree, [*stop, *self.job.files], CHOSEN=str(chosen), LOG=name)

    @property
    def weight(self) -> int:
        return POOL_WEIGHT if self.job.pool else 1

    def reports(self) -> list[dict[str, Any]]:
        """One per finished test phase."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def verdict(self) -> str | None:
        """The test that killed the mutant, or how its pytest ended; "" if nothing did; None while it runs."""
        late = time.monotonic() - self.started > self.limit
        code = self.process.poll()
        if code is None and not late:
            return None
        self.stop()
        failed = next((report["test"] for report in self.reports() if report["failed"]), "")
        if failed or code in (0, 5):  # 5: no test was collected
            return failed
        return f"{self.job.files[0]}: {'timeout' if late else f'pytest ended with {code}'}"

    def stop(self) -> None:
        """End the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start_pytest(tree: Path, options: Sequence[str], **paths: str) -> subprocess.Popen[bytes]:
    """pytest in `tree`, in a process group of its own, with this file as a plugin."""
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",  # what was compiled for another mutant
        **{f"MUTATE_{name}": path for name, path in paths.items()},
    }
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "tests.helpers.mutation_jobs", "-q", "--no-header", "--tb=no", *options],
        cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only the tests of the job; without one, all of them are written down."""
    if "MUTATE_CHOSEN" in os.environ:
        chosen = set(Path(os.environ["MUTATE_CHOSEN"]).read_text().split("\n"))
        items[:] = [item for item in items if item.nodeid in chosen]
    elif "MUTATE_LOG" in os.environ:
        marks = ("slow", "sweep", "gpu")
        tests = [
            {"test": item.nodeid, "pool": "pool" in getattr(item, "fixturenames", ())}
            for item in items
            if not any(item.get_closest_marker(mark) for mark in marks)
        ]
        Path(os.environ["MUTATE_LOG"]).write_text("\n".join(map(json.dumps, tests)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "MUTATE_LOG" in os.environ:
        line = {"test": report.nodeid, "seconds": report.duration, "failed": report.failed}
        with Path(os.environ["MUTATE_LOG"]).open("a") as log:
            log.write(json.dumps(line) + "\n")


def copy_tree(into: Path, mutant: Mutant | None = None) -> Path:
    """A copy in which one token differs. Compiled files travel along: they name their source's time, which stays."""
    into.mkdir()
    for folder in TREE:
        shutil.copytree(ROOT / folder, into / folder, symlinks=True)
    for file in ROOT.glob("*.*"):
        if file.is_file() and not file.name.startswith("."):
            shutil.copy2(file, into)
    if mutant is not None:
        (into / mutant.file).write_text(mutant.applied((ROOT / mutant.file).read_text()))
    return into


def collect(tree: Path, places: list[str]) -> list[Job]:
    """All tests of these folders and files, a few to a job, for nothing is known of their costs."""
    log = tree / "collected"
    start_pytest(tree, ["--collect-only", *places], LOG=str(log)).wait()
    found: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for test in map(json.loads, log.read_text().splitlines()):
        found[test["test"].partition("::")[0], test["pool"]].append(test["test"])
    return [
        Job(tuple(tests[first : first + size]), pool)
        for (_, pool), tests in found.items()
        for size in (8 if pool else 20,)
        for first in range(0, len(tests), size)
    ]


class Baseline:
    """Results of the unchanged tree: its jobs, seconds of each test, and tests that failed."""

    def __init__(self, tree: Path, places: list[str], workers: int, ends: float) -> None:
        waiting = sorted(collect(tree, places), key=lambda job: -job.pool * len(job.tests))
        running: list[Run] = []
        self.seconds: Counter[str] = Counter()
        self.failed: set[str] = set()
        self.jobs: list[Job] = []
        while waiting or running:
            while waiting and sum(run.weight for run in running) < workers:
                running.append(Run(waiting.pop(0), tree, limit=ends - time.monotonic()))
            time.sleep(0.05)
            for run in [run for run in running if run.verdict() is not None]:
                running.remove(run)
                self.jobs.append(run.job)
                for report in run.reports():
                    self.seconds[report["test"]] += report["seconds"]
                    self.failed |= {report["test"]} if report["failed"] else set()
        # A test that was not reached counts as failed: its job ended before.
        self.failed |= {test for job in self.jobs for test in job.tests} - set(self.seconds)

    def packed(self, most: float) -> list[Job]:
        """Jobs of about `most` seconds, each of one folder."""
        rooms: dict[tuple[str, bool], list[str]] = defaultdict(list)
        for job in self.jobs:
            rooms[str(Path(job.files[0]).parent), job.pool] += [test for test in job.tests if test not in self.failed]
        found: list[Job] = []
        for (_, pool), tests in rooms.items():
            part: list[str] = []
            for test in [*sorted(tests, key=lambda test: test.partition("::")[0]), ""]:
                cost = sum(self.seconds[each] for each in part)
                if part and (not test or cost + self.seconds[test] > most):
                    found.append(Job(tuple(part), pool, cost))
                    part = []
                part.append(test)
        return found
