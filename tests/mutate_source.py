"""Changes one token of the source at a time and says which tests notice.

    python tests/mutate_source.py --workers 64 --deadline 520 --out mutants.jsonl

First every test runs once on the unchanged tree, which gives costs and leaves out what fails anyway. Tests are then
packed into jobs of about `--job-seconds`. A mutant gets a copy of the tree; its jobs run likeliest kill per second
first, those with a process pool only when all others passed, until one fails. `--out` gets a JSON line per mutant.

Mutants depend on the source and `--seed` alone: the same on every machine, whatever the tests are.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.helpers.mutation_jobs import ROOT, Baseline, Job, Run, copy_tree
from tests.helpers.source_mutants import Mutant, mutants_of

ROOMS = {
    "planning": "cp_rewrite/planning",
    "predicate": "passes/predicate",
    "locality": "passes/locality",
    "ops": "cp_rewrite/ops",
    "kernels": "cp_rewrite/kernels",
    "batch": "cp_rewrite/batch",
}
LEFT_OUT = re.compile(r".*/(plot|cuda|nvtx|fa3|fa4|aten_flash|overlap|pushed/.*|push_rows|peers/(?!reasons).*)\.py")
"""Modules that only run on GPUs, and drawings."""
START_S = 8.0
"""Python, torch and transformers, before the first test of a job."""


def draw_mutants(count: int, seed: int) -> list[Mutant]:
    """`count` mutants of all rooms, at most one per line."""
    found: list[Mutant] = []
    for room, folder in ROOMS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            if not LEFT_OUT.fullmatch(str(file)):
                found += mutants_of(room, str(file.relative_to(ROOT)), file.read_text())
    draw = random.Random(seed)
    draw.shuffle(found)
    one_per_line = {(mutant.file, mutant.line): mutant for mutant in reversed(found)}
    return [mutant for mutant in found if one_per_line[mutant.file, mutant.line] is mutant][:count]


@dataclass(eq=False)
class Trial:
    """One mutant and what is left to do for it."""

    mutant: Mutant
    left: list[Job]
    running: list[Run] = field(default_factory=list[Run])
    tree: Path | None = None
    seconds: float = 0.0
    verdict: str | None = None

    def open_jobs(self) -> list[Job]:
        """Jobs that may start now: those with a pool when all others have passed."""
        plain = [job for job in self.left if not job.pool]
        if plain or any(not run.job.pool for run in self.running):
            return plain
        return self.left

    def line(self) -> dict[str, Any]:
        what = "killed" if self.verdict else "open" if self.verdict is None else "survived"
        mutant = self.mutant
        return {
            "mutant": mutant.name, "room": mutant.room, "file": mutant.file, "line": mutant.line,
            "before": mutant.before, "after": mutant.after, "source": mutant.source,
            "what": what, "killed_by": self.verdict,
            "jobs_left": len(self.left) + len(self.running), "seconds": round(self.seconds, 1),
        }  # fmt: skip


class Session:
    """Runs trials until all have a verdict or the time is over."""

    def __init__(self, trials: list[Trial], folder: Path, out: Path, limit: float) -> None:
        self.trials, self.folder, self.out, self.limit = trials, folder, out, limit
        self.tried: Counter[tuple[str, Job]] = Counter()
        self.kills: Counter[tuple[str, Job]] = Counter()

    def score(self, room: str, job: Job) -> float:
        """Likely kills per second, from what it did to this room so far."""
        key = room, job
        return (self.kills[key] + job.odds(room)) / (self.tried[key] + 1) / (job.seconds + START_S)

    def start_next(self) -> bool:
        """The best job of the mutant for which least is running."""
        able = [trial for trial in self.trials if trial.verdict is None and trial.open_jobs()]
        if not able:
            return False
        trial = min(able, key=lambda trial: (len(trial.running), -len(trial.left)))
        job = max(trial.open_jobs(), key=lambda job: self.score(trial.mutant.room, job))
        trial.left.remove(job)
        if trial.tree is None:
            trial.tree = copy_tree(Path(tempfile.mkdtemp(dir=self.folder)) / "tree", trial.mutant)
        trial.running.append(Run(job, trial.tree, trial.mutant, 3 * job.seconds + self.limit))
        return True

    def look(self, trial: Trial) -> None:
        """Take what ended; settle the mutant when it was killed or nothing is left."""
        for run in list(trial.running):
            verdict = run.verdict()
            if verdict is None:
                continue
            trial.running.remove(run)
            trial.seconds += time.monotonic() - run.started
            self.tried[trial.mutant.room, run.job] += 1
            if verdict:
                self.kills[trial.mutant.room, run.job] += 1
                trial.verdict = verdict
                break
        if trial.verdict is None and not trial.left and not trial.running:
            trial.verdict = ""
        if trial.verdict is not None:
            self.settle(trial)

    def settle(self, trial: Trial) -> None:
        """End what still runs, write the line, drop the copy."""
        with self.out.open("a") as out:
            out.write(json.dumps(trial.line()) + "\n")
        for run in trial.running:
            run.stop()
        trial.running.clear()
        if trial.tree is not None:
            shutil.rmtree(trial.tree.parent, ignore_errors=True)

    def run(self, workers: int, ends: float) -> None:
        try:
            while (live := self.live()) and time.monotonic() < ends:
                while sum(run.weight for trial in live for run in trial.running) < workers and self.start_next():
                    pass
                time.sleep(0.05)
                for trial in live:
                    self.look(trial)
        finally:
            for trial in self.live():
                self.settle(trial)

    def live(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.verdict is None]


def summary(trials: Iterable[Trial]) -> Iterator[str]:
    """Rates per room, the files that kill, and who survived."""
    rooms: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        rooms[trial.mutant.room].append(trial)
        rooms["all"].append(trial)
    for room in (*ROOMS, "all"):
        counts = Counter(trial.line()["what"] for trial in rooms[room])
        done = counts["killed"] + counts["survived"]
        yield f"{room:10} {counts['killed']:4} of {done:4} killed, {counts['open']} not finished"
    files = Counter(trial.verdict.partition(":")[0] for trial in rooms["all"] if trial.verdict)
    yield from (f"{count:4} killed by {file}" for file, count in files.most_common())
    for trial in rooms["all"]:
        if not trial.verdict:
            what = "survived" if trial.verdict == "" else f"not finished, {len(trial.left)} jobs left"
            yield f"{what}: {trial.mutant.name}\n    {trial.mutant.source}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=150, help="mutants (150)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds after which all stops (3600)")
    parser.add_argument("--timeout", type=float, default=60.0, help="of a job: this and 3 times what it took unchanged")
    parser.add_argument("--job-seconds", type=float, default=30.0, help="tests of so many seconds make a job (30)")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="folders or files of tests (tests)")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--again", type=Path, help="an earlier --out: only its mutants that nothing killed")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    options = parser.parse_args()
    started = time.monotonic()
    mutants = draw_mutants(options.count, options.seed)
    if options.again:
        lines = map(json.loads, options.again.read_text().splitlines())
        alive = {line["mutant"] for line in lines if line["what"] != "killed"}
        mutants = [mutant for mutant in mutants if mutant.name in alive]
    if options.list:
        print("\n".join(f"{mutant.name}\n    {mutant.source}" for mutant in mutants))
        return
    options.out.write_text("")
    ends = started + options.deadline
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = Baseline(copy_tree(folder / "unchanged"), options.tests, options.workers, ends)
        jobs = base.packed(options.job_seconds)
        print(f"unchanged: {len(base.seconds)} tests, {sum(base.seconds.values()):.0f} s in {len(jobs)} jobs,", end=" ")
        print(f"{time.monotonic() - started:.0f} s; left out for they fail: {sorted(base.failed)}", flush=True)
        trials = [Trial(mutant, list(jobs)) for mutant in mutants]
        Session(trials, folder, options.out, options.timeout).run(options.workers, ends)
    print("\n".join(summary(trials)))
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
