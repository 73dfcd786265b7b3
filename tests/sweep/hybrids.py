"""Hybrids on gloo ranks beside one process in fp64: families x ranks x layouts x documents, with and without resets.

    python -m tests.sweep.hybrids [--families Mamba2ForCausalLM,…] [--ranks 2,3,4] [--jobs 8] [--seconds 240]

With `reset_states` the one process runs each document by itself, where attention keeps to documents; a family whose
attention does not is tried without its layers of attention. A line for each family and number of ranks: the largest
relative difference, of the loss and of any gradient, and where it was.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.diagnose.check import floor_of
from tests.end_to_end.test_end_to_end import make_batch
from tests.helpers.pool import Pool

from .cases import Case, Wrapped, build
from .configs import VOCAB
from .trial import LIMIT, difference, gradients, in_double

FAMILIES = (
    "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "OlmoHybridForCausalLM", "KimiLinearForCausalLM", "Mamba2ForCausalLM",
    "BambaForCausalLM", "FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM", "NemotronHForCausalLM",
    "Zamba2ForCausalLM", "JambaForCausalLM", "MambaForCausalLM", "FalconMambaForCausalLM", "MiniMaxForCausalLM",
)  # fmt: skip
ACROSS = ("GraniteMoeHybridForCausalLM",)
"""Families whose attention sees whole rows: documents are not as they are alone."""
EXACT = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "OlmoHybridForCausalLM")
"""Families whose own rounding to fp32 is beyond the limit."""
LAYOUTS = ("balanced", "contiguous", "head_tail", "dual_chunk")
SIZES = (((1, 37, 1, 70, 1, 1, 26),), ((64, 1, 66),), ((131,),), ((1, 1, 1, 1, 1),), ((3, 94), (97,)))
"""Rows of lengths of documents: odd ones, ones of a token, cuts at and beside multiples of 64, hardly a token for each
rank, two rows."""
TOKENS = {"input_ids": 1, "position_ids": 1, "labels": 1}


@dataclass(frozen=True)
class Worst:
    """The largest difference that was seen, how many steps were compared, and where the largest was."""

    difference: float = 0.0
    steps: int = 0
    where: str = ""

    def seen(self, difference: float, where: str) -> Worst:
        if difference > self.difference or difference != difference:
            return Worst(difference, self.steps, where)
        return self


def batch_of(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Each token has a target."""
    batch = make_batch([[*lengths] for lengths in rows], VOCAB)
    return {**batch, "input_ids": batch["input_ids"].clamp(min=3), "labels": batch["input_ids"].flip(1)}


def model_of(name: str, resets: bool) -> Wrapped:
    """A family's model; without attention where that would see more than a document that runs alone."""
    wrapped: Any = build(Case(name, "causal", own_loss=False))
    if resets and name in ACROSS:
        decoder = wrapped.model.model
        decoder.layers = nn.ModuleList(layer for layer in decoder.layers if layer.self_attn is None)
        assert len(decoder.layers)
    return wrapped


def alone(model: Wrapped, batch: dict[str, Tensor], rows: Sequence[Sequence[int]]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process, of parts of rows that it runs one by one."""
    count, total = torch.tensor(batch["labels"].numel()), 0.0
    for row, lengths in enumerate(rows):
        for parts in zip(*(value[row : row + 1].split(list(lengths), 1) for value in batch.values()), strict=True):
            loss = model(**dict(zip(batch, parts, strict=True)), num_items_in_batch=count).loss
            loss.backward()
            total += float(loss.detach())
    found = gradients(model)
    model.zero_grad()
    return total, found


@contextmanager
def exact(model: Wrapped) -> Generator[None]:
    """Models round to fp32 what they find delicate: here that stays in fp64, in graphs too."""
    kind: Any = Tensor
    to = kind.to

    def wide(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return to(x, *args, **{k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()})

    with mock.patch.object(kind, "float", kind.double), mock.patch.object(kind, "to", wide), in_double(model):
        yield


def on_ranks(mesh: DeviceMesh, name: str, resets: bool) -> Worst:
    """All layouts and sizes by one compiled model."""
    torch._dynamo.reset()
    model, worst = model_of(name, resets), Worst()
    with exact(model) if name in EXACT else in_double(model):
        model = model.double()
        packing = cp.PositionIds("position_ids")
        base = cp.Sharding(mesh, TOKENS, packing, inner="eager", across_documents=True, reset_states=resets)
        compiled = torch.compile(model, backend=cp.backend(base), fullgraph=True)
        for rows in SIZES:
            batch = batch_of(rows)
            loss, grads = alone(model, batch, rows if resets else [[sum(lengths)] for lengths in rows])
            for layout in LAYOUTS:
                sharding: Any = replace(base, layout=layout)
                with sharding.shard(batch) as local:
                    part = compiled(**local).loss
                    total = sharding.whole(part).item()
                part.backward()
                cp.sum_gradients(model.parameters(), sharding)
                where = f"{layout} {rows}"
                worst = replace(worst, steps=worst.steps + 1).seen(abs(total - loss) / max(abs(loss), 1e-12), where)
                found = gradients(model)
                floor = floor_of(grads.values())
                for key, grad in grads.items():
                    worst = worst.seen(difference(found.get(key), grad, floor), f"{where} {key}")
                model.zero_grad()
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--jobs", type=int, default=2, help="cases at once, each on its own processes")
    parser.add_argument("--seconds", type=float, default=3600, help="for all; what is not reached is told")
    args = parser.parse_args()
    ranks = [int(count) for count in args.ranks.split(",")]
    end = time.monotonic() + args.seconds
    pools = [Pool(max(ranks)) for _ in range(args.jobs)]
    wanted = [(n, name, resets) for n in ranks[::-1] for name in args.families.split(",") for resets in (False, True)]
    outcomes: list[str] = []

    def try_one(count: int, name: str, resets: bool) -> None:
        start, pool = time.monotonic(), pools.pop()
        try:
            worst = max(pool.run(count, on_ranks, name, resets), key=lambda worst: worst.difference)
            verdict = "right" if worst.difference <= LIMIT else "DIFFERENT"
            words = f"{worst.difference:.1e} in {worst.steps} steps, {worst.where}"
        except AssertionError as error:
            verdict, words = "FAILED", str(error)[-300:]
        finally:
            pools.append(pool)
        outcomes.append(verdict)
        how = "resets" if resets else "as it is"
        print(f"{verdict} | {name} | {count} ranks | {how} | {words} | {time.monotonic() - start:.0f} s", flush=True)

    with ThreadPoolExecutor(args.jobs) as threads:
        for case in wanted:
            threads.submit(
                lambda case=case: try_one(*case) if time.monotonic() < end else outcomes.append("not reached")
            )
    for pool in pools:
        pool.close()
    print({verdict: outcomes.count(verdict) for verdict in sorted({*outcomes})}, f"of {len(wanted)}")


if __name__ == "__main__":
    main()
