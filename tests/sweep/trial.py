"""One case on one rank: build it, run it on one process, prove it, run it sharded, compare."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.diagnose import check
from cp_rewrite.diagnose.check import floor_of
from cp_rewrite.ops.tiles import REGIONS
from cp_rewrite.refusal import Refusal, RewriteRefused

from .cases import Case, batch_of, build, sharding_of, shifts
from .layers import absent_from, kinds_of

LIMIT = 1e-5


@dataclass
class Outcome:
    """Outcome of a case.

    Args:
        verdict: "right", "refused", "torch" (it can't capture the model, with us or without), "unbuilt" (the plain
            model fails), "different", "crashed", "hung".
        why: of all but "right".
        loss, gradient: relative differences to one process, of the gradient that is nearest to its limit: 1e-5, or
            four times its noise.
        fp64: whether they are of a comparison in fp64, after one in fp32 was beyond its limit.
        noise: of that gradient on one process, between fp32 and fp64.
        tile: rows of a tile, where there are tiles. tiled: regions that ran tile by tile.
        layers: the kinds of layers that it has. absent: those of the model's file that it has none of.
        batches: of a trainer: kind of batch -> verdict.
    """

    name: str
    head: str
    verdict: str = ""
    own_loss: bool = True
    training: bool = True
    attention: str = ""
    masks: list[str] = field(default_factory=list[str])
    why: list[str] = field(default_factory=list[str])
    sums: int = 0
    loss: float = 0.0
    gradient: float = 0.0
    noise: float = 0.0
    fp64: bool = False
    worst: str = ""
    layers: list[str] = field(default_factory=list[str])
    absent: list[str] = field(default_factory=list[str])
    tile: int | None = None
    tiled: int = 0
    seconds: float = 0.0
    batches: dict[str, str] = field(default_factory=dict[str, str])


class Trial:
    """Runs a case on one rank. `stage` is told what it is at."""

    ranks = 2

    def __init__(self, case: Case, rank: int, mesh_of: Callable[[], DeviceMesh], stage: Callable[[str], None]) -> None:
        self.case, self.rank, self.mesh_of, self.stage = case, rank, mesh_of, stage
        self.outcome = Outcome(case.name, case.head, own_loss=case.own_loss, training=case.training, tile=case.tile)

    def run(self) -> Outcome:
        out = self.outcome
        self.stage("plain")
        try:
            model = build(self.case)
            out.attention = str(model.model.config._attn_implementation)
            out.layers, out.absent = kinds_of(model.model), absent_from(model.model)
            whole = self.whole_batch()
            loss, grads = step(model, whole)
            noise = rounding(model, whole, grads)
        except Exception as error:
            return self.ended("unbuilt", error)
        self.stage("explain")
        torch._dynamo.reset()
        if self.rank == 0 and not self.proven(model, whole):
            return out
        self.stage("sharded")
        torch._dynamo.reset()
        model.zero_grad()
        try:
            total, sharded = self.sharded_step(model)
        except Exception as error:
            if isinstance(error, RewriteRefused):
                return self.refused(error.refusals, "late: ")
            return self.ended("crashed", error)
        out = self.compared((loss, total), grads, sharded, noise)
        return out if out.verdict == "right" else self.in_fp64(model, whole)

    def whole_batch(self) -> dict[str, Tensor]:
        """The batch that one process calls the model with."""
        batch = batch_of(self.case)
        if shifts(self.case) and not self.case.own_loss:
            batch["shift_labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        return batch

    def proven(self, model: nn.Module, whole: dict[str, Tensor]) -> bool:
        """True if a dry run has nothing against the model. The outcome notes what it says."""
        out = self.outcome
        sharding, batch = sharding_of(self.case, 2), batch_of(self.case)
        try:
            report = cp.explain(model, sharding, shift_labels=shifts(self.case))(**batch)
        except Exception as error:
            plain = plain_capture(model, whole)
            self.ended("crashed" if plain is None else "torch", error if plain is None else plain)
            return False
        out.masks = [*dict.fromkeys(site.mask for site in report.sites)]
        out.sums = sum(collective.bytes > 0 for collective in report.collectives)
        if not report.ok:
            self.refused(report.refusals)
        return report.ok

    def sharded_step(self, model: nn.Module) -> tuple[float, dict[str, Tensor]]:
        sharding, batch = sharding_of(self.case, self.mesh_of()), batch_of(self.case)
        compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
        with sharding.shard(batch, shift_labels=shifts(self.case)) as local:
            loss = compiled(**local).loss
            total = sharding.whole(loss).item()
        loss.backward()
        self.outcome.tiled = len(REGIONS)
        cp.sum_gradients(model.parameters(), sharding)
        return total, gradients(model)

    def compared(
        self, losses: tuple[float, float], grads: dict[str, Tensor], sharded: dict[str, Tensor], noise: dict[str, float]
    ) -> Outcome:
        out = self.outcome
        floor = floor_of(grads.values())
        errors = {key: difference(sharded.get(key), grad, floor) for key, grad in grads.items()}
        allowed = {key: max(LIMIT, 4 * noise[key]) for key in grads}
        out.worst = max(errors, key=lambda key: errors[key] / allowed[key])
        out.loss, out.gradient = abs(losses[1] - losses[0]) / max(abs(losses[0]), 1e-12), errors[out.worst]
        out.noise = noise[out.worst]
        right = out.loss <= LIMIT and out.gradient <= allowed[out.worst]
        out.verdict = "right" if right else "different"
        if not right:
            out.why = [f"loss {losses[0]} and {losses[1]}; {out.worst}: {out.gradient}, of fp32 itself {out.noise}"]
        return out

    def in_fp64(self, model: nn.Module, whole: dict[str, Tensor]) -> Outcome:
        """Both once more: rounding is far below the limit then."""
        out, why = self.outcome, self.outcome.why
        self.stage("fp64")
        torch._dynamo.reset()
        model.zero_grad()
        try:
            with in_double(model):
                loss, grads = step(model.double(), whole)
                total, sharded = self.sharded_step(model)
        except Exception as error:
            out.why = [*why, f"in fp64: {error}"]
            return out
        self.compared((loss, total), grads, sharded, dict.fromkeys(grads, 0.0))
        out.fp64, out.why = True, why if out.verdict == "different" else []
        return out

    @staticmethod
    def next_try(case: Case, outcome: Outcome) -> list[Case]:
        """A case that is not right, with a loss outside of the model; one that drops layers or draws experts in
        training, which torch can't capture or we refuse, out of it."""
        draws = any(why.startswith(("DROPOUT", "Unsupported: Data-dependent branching")) for why in outcome.why)
        if draws and case.training:
            return [replace(case, training=False)]
        if outcome.verdict != "right" and case.own_loss and case.head != "sequence":
            return [replace(case, own_loss=False)]
        return []

    def refused(self, refusals: Any, prefix: str = "") -> Outcome:
        self.outcome.verdict = "refused"
        self.outcome.why = [*dict.fromkeys(prefix + short(refusal) for refusal in refusals)]
        return self.outcome

    def ended(self, verdict: str, error: Exception) -> Outcome:
        self.outcome.verdict = verdict
        text = "".join(traceback.format_exception(error))
        self.outcome.why = [f"{type(error).__name__}: {str(error)[:600]}", text[-3000:]]
        return self.outcome


def short(refusal: Refusal) -> str:
    """Its place without folders, its reason and what was found."""
    place = refusal.where.rpartition("/")[2] if "/" in refusal.where.partition(",")[0] else refusal.where
    if "/" in refusal.where:
        head, comma, code = refusal.where.partition(", ")
        place = head.rpartition("/")[2] + comma + code
    return f"{refusal.reason.name}: {place}: {refusal.detail}"


def step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    loss: Tensor = model(**batch).loss
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    return float(loss.detach()), found


@contextmanager
def in_double(model: Any) -> Generator[None]:
    """Models make constants of the default dtype: the lowest fp64 number is none of fp32. torch's grouped products of
    experts take no fp64: one product for each token does."""
    torch.set_default_dtype(torch.float64)
    grouped = [m for m in model.modules() if getattr(getattr(m, "config", None), "_experts_implementation", None)]
    grouped = [m for m in grouped if m.config._experts_implementation == "grouped_mm"]
    for module in grouped:
        module.config._experts_implementation = "batched_mm"
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        for module in grouped:
            module.config._experts_implementation = "grouped_mm"


def rounding(model: nn.Module, batch: dict[str, Tensor], grads: dict[str, Tensor]) -> dict[str, float]:
    """How far one process's gradients in fp32 are from those in fp64; the model ends as it was."""
    before = {name: value.clone() for name, value in model.state_dict(keep_vars=False).items()}
    try:
        with in_double(model):
            _, exact = step(model.double(), batch)
    except RuntimeError:  # it mixes dtypes
        exact = grads
    model.float().load_state_dict(before)
    floor = floor_of(grads.values())
    return {name: difference(exact[name].float(), grad, floor) for name, grad in grads.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(actual: Tensor | None, expected: Tensor, floor: float) -> float:
    """Relative norm error; a gradient that is not there counts as 0."""
    return check.difference(torch.zeros_like(expected) if actual is None else actual, expected, floor)


def plain_capture(model: nn.Module, batch: dict[str, Tensor]) -> Exception | None:
    """Why torch.compile can't capture the plain model with a token count of any size; None: it can."""
    torch._dynamo.reset()
    try:
        torch.compile(model, backend="eager", fullgraph=True, dynamic=True)(**batch)
    except Exception as error:
        return error
    return None
