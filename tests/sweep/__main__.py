"""Tries many models of `transformers`; each outcome is a JSON line.

python -m tests.sweep --models LlamaForCausalLM,BertForMaskedLM --workers 2 --deadline 500 --out outcomes.jsonl
python -m tests.sweep --trainer --workers 32   # what the Trainer calls each class with, beside the caller's batch
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from .cases import all_cases
from .processes import sweep
from .table import write
from .trainer import TrainerTrial
from .trial import Outcome, Trial


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="names of classes, or kinds as in causal, encoder; default: all")
    parser.add_argument(
        "--workers", type=int, default=2, help="cases at once, on two processes each; a trainer's on one"
    )
    parser.add_argument("--limit", type=float, default=120, help="seconds for a case")
    parser.add_argument("--deadline", type=float, default=3600, help="seconds for all")
    parser.add_argument("--trainer", action="store_true", help="compare the Trainer's batches with the caller's")
    parser.add_argument("--tile", type=int, help="rows of a tile, as Sharding(tile=…) has it")
    parser.add_argument("--out", type=Path, default=Path("outcomes.jsonl"))
    parser.add_argument("--write", type=Path, help="only write docs/generated/models.md from these outcomes")
    options = parser.parse_args()
    if options.write:
        lines = options.write.read_text().splitlines()
        versions, outcomes = json.loads(lines[0])["versions"], [Outcome(**json.loads(line)) for line in lines[1:]]
        return write(outcomes, versions)
    names = [name for name in options.models.split(",") if name]
    cases = [
        replace(case, tile=options.tile)
        for case in all_cases()
        if not names or case.name in names or case.head in names
    ]
    counts: Counter[str] = Counter()
    untried = dict.fromkeys(case.name for case in cases)
    transformers: Any = importlib.import_module("transformers")
    versions = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    options.out.write_text(json.dumps({"versions": versions}) + "\n")

    def done(outcome: Outcome) -> None:
        counts[outcome.verdict] += 1
        untried.pop(outcome.name, None)
        with options.out.open("a") as out:
            out.write(json.dumps(asdict(outcome)) + "\n")
        words = outcome.why[0].splitlines()[0][:150] if outcome.why else ""
        print(f"{outcome.seconds:6} {outcome.name} {outcome.verdict} {words}", flush=True)

    trial = TrainerTrial if options.trainer else Trial
    sweep(cases, options.workers, options.limit, time.monotonic() + options.deadline, done, trial)
    print(dict(counts), f"{len(cases)} cases, {len(untried)} not reached: {', '.join(untried)}")


if __name__ == "__main__":
    main()
