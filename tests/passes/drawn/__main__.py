"""Draws many masks: how many were accepted, refused and wrong."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from .kinds import KINDS
from .read import FORMS, run

SHARE = 250
"""Masks of one task. Each task has batches of its own."""


def task(name: str, variant: int, form: str, masks: int, seed: int) -> tuple[str, str, Counter[str], list[str]]:
    torch.set_num_threads(1)
    return name, form, *run(KINDS[name]()[variant], form, masks, seed)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.passes.drawn", description=__doc__)
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="all")
    parser.add_argument("--form", choices=[*FORMS, "all"], default="all")
    parser.add_argument("--masks", type=int, default=10_000, help="of each kind in each form")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    kinds = list(KINDS) if args.kind == "all" else [args.kind]
    forms = list(FORMS) if args.form == "all" else [args.form]
    totals: dict[tuple[str, str], Counter[str]] = {(kind, form): Counter() for kind in kinds for form in forms}
    start = time.time()
    with ProcessPoolExecutor(args.processes) as pool:
        tasks = [
            pool.submit(
                task,
                kind,
                number % len(KINDS[kind]()),
                form,
                min(SHARE, args.masks - at),
                args.seed + 3 * number + at_form,
            )
            for number, at in enumerate(range(0, args.masks, SHARE))
            for kind in kinds
            for at_form, form in enumerate(forms)
        ]
        for done in as_completed(tasks):
            kind, form, found, wrong = done.result()
            totals[kind, form] += found
            for text in wrong:
                print("WRONG", kind, form, text, flush=True)
            print(f"{time.time() - start:.0f} s", kind, form, json.dumps(totals[kind, form]), flush=True)


if __name__ == "__main__":
    main()
