"""Outcome of a model on two ranks, compared with one process: right, refused, raised, or a fault of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.diagnose.check import difference, floor_of
from cp_rewrite.sharding import Inner
from tests.border.forks import HANG, Failure, Forks
from tests.border.model import TOKENS

LIMIT = 1e-4
"""Relative norm error of a loss or a gradient in fp32."""


class Kind(Enum):
    """How a case ends. The first four keep the promise."""

    RIGHT = "right"
    REFUSED = "refused, with a Reason"
    RAISED = "an error of ours on all ranks"
    UNTRACED = "torch can't compile it, on all ranks"
    SILENT = "silently different"
    CRASHED = "a foreign error"
    HUNG = "a rank waits for one that failed"


KEPT = (Kind.RIGHT, Kind.REFUSED, Kind.RAISED, Kind.UNTRACED)


@dataclass(frozen=True)
class Outcome:
    kind: Kind
    detail: str
    failures: Sequence[Failure] = ()

    @property
    def reasons(self) -> set[str]:
        return {reason for failure in self.failures for reason in failure.reasons}

    def __str__(self) -> str:
        return f"{self.kind.name}: {self.detail}"


@dataclass
class Case:
    """One training program. Made anew in each process, by a function that a test names.

    Args:
        model: makes the model. batches: one per step. tokens, packing: of `Sharding`. shard: of `shard`.
            The model has it as `sharding`, of one rank where it runs alone.
        on_rank: called with the rank and the model, before the first step (seeds, for one).
        fullgraph: of torch.compile. inner: the compiler of rewritten graphs. how: more arguments of `Sharding`.
    """

    model: Callable[[], nn.Module]
    batches: Sequence[Mapping[str, Any]]
    tokens: Mapping[str, int] = field(default_factory=lambda: dict(TOKENS))
    packing: cp.CuSeqlens | cp.PositionIds | cp.DocumentIds = field(default_factory=lambda: cp.DocumentIds("doc_ids"))
    shard: Mapping[str, Any] = field(default_factory=dict[str, Any])
    on_rank: Callable[[int, nn.Module], None] | None = None
    fullgraph: bool = True
    inner: Inner = "eager"
    how: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Step:
    """Scalars by name, the loss first, and gradients by parameter."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


def observe(forks: Forks, make: Callable[..., Case], *args: Any, world_size: int = 2) -> Outcome:
    """Run `make(*args)` on one process and on ranks."""
    ranks = forks.run(world_size, both, make, args)
    failures = [rank for rank in ranks if isinstance(rank, Failure)]
    if failures:
        return _of_failures(failures, len(ranks))
    return compare(ranks[0][0], [sharded for _, sharded in ranks])


def both(mesh: DeviceMesh, make: Callable[..., Case], args: Sequence[Any]) -> tuple[list[Step] | None, list[Step]]:
    """(the steps of one process, those of this rank). Rank 0 plays the one process too, first."""
    try:
        plain = steps_alone(make(*args)) if mesh.get_local_rank() == 0 else None
    except Exception as error:
        raise ValueError(f"the case is none: one process fails: {error}") from error
    return plain, steps_sharded(make(*args), mesh)


def steps_alone(case: Case) -> list[Step]:
    torch.manual_seed(0)
    model = case.model()
    model.sharding = cp.Sharding(1, case.tokens, case.packing)  # type: ignore[assignment]
    if case.on_rank:
        case.on_rank(0, model)
    steps = [_step(model, scalars(model(**_given(case, batch)))) for batch in case.batches]
    invalid = [name for step in steps for name, x in step.values.items() | step.gradients.items() if not _finite(x)]
    if invalid:
        raise ValueError(f"{invalid} are not finite")
    return steps


def _given(case: Case, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch that one process calls its model with: labels shifted, where `shard` shifts them."""
    if not case.shard.get("shift_labels"):
        return batch
    name = case.shard.get("label_arg", "labels")
    shifted = torch.cat([batch[name][:, 1:], torch.full_like(batch[name][:, :1], -100)], 1)
    return {**batch, "shift_labels": shifted, "num_items_in_batch": (shifted != -100).sum()}


def steps_sharded(case: Case, mesh: DeviceMesh) -> list[Step]:
    torch.manual_seed(0)
    sharding = cp.Sharding(mesh, case.tokens, case.packing, inner=case.inner, **case.how)
    model = case.model()
    model.sharding = sharding  # type: ignore[assignment]
    if case.on_rank:
        case.on_rank(mesh.get_local_rank(), model)
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=case.fullgraph)
    steps: list[Step] = []
    for batch in case.batches:
        with sharding.shard(batch, **case.shard) as local:
            steps.append(_step(model, scalars(compiled(**local)), sharding))
    dist.barrier()
    return steps


def _step(model: nn.Module, values: dict[str, Tensor], sharding: cp.Sharding | None = None) -> Step:
    model.zero_grad()
    next(iter(values.values())).backward()
    if sharding is not None:
        cp.sum_gradients(model.parameters(), sharding)
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step({name: x.detach().clone() for name, x in values.items()}, grads)


def scalars(out: Any) -> dict[str, Tensor]:
    """Numbers and vectors of a model's output by place; per-token outputs are left out."""
    outs = out if isinstance(out, tuple) else (out,)
    return {f"output {i}": x for i, x in enumerate(outs) if isinstance(x, Tensor) and x.ndim < 2}


def compare(plain: Sequence[Step], ranks: Sequence[Sequence[Step]]) -> Outcome:
    """Largest difference of all steps: of outputs (parts of a sum, or equal) and of summed gradients."""
    found: list[tuple[float, str]] = []
    for i, expected in enumerate(plain):
        steps = [rank[i] for rank in ranks]
        for name, value in expected.values.items():
            found.append((_joined(value, [s.values[name] for s in steps]), f"{name} of step {i}"))
        floor = floor_of(expected.gradients.values())
        for name, grad in expected.gradients.items():
            for step in steps:
                actual = step.gradients.get(name, torch.zeros_like(grad))
                found.append((difference(actual, grad, floor), f"gradient of {name}, step {i}"))
        for name in {name for step in steps for name in step.gradients} - {*expected.gradients}:
            found.append((float("inf"), f"gradient of {name}, step {i}, which one process has not"))
    worst, where = max(found)
    return Outcome(Kind.SILENT if worst > LIMIT else Kind.RIGHT, f"{where}: {worst:.1e}")


def _joined(value: Tensor, parts: Sequence[Tensor]) -> float:
    """Parts that add up, or one value that all have."""
    same = max(difference(part, value) for part in parts)
    return min(difference(torch.stack(list(parts)).sum(0), value), same)


def _finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def _of_failures(failures: Sequence[Failure], world_size: int) -> Outcome:
    invalid = [f for f in failures if "the case is none" in f.message]
    assert not invalid, invalid[0].message
    foreign = [f for f in failures if not f.ours and f.kind != HANG]
    first = (foreign or failures)[0]
    detail = f"{first.kind}: {first.message[:1500]}"
    if any(f.kind == HANG for f in failures) or len(failures) < world_size:
        return Outcome(Kind.HUNG, detail, failures)
    if all(f.untraced for f in failures):
        return Outcome(Kind.UNTRACED, detail, failures)
    if foreign:
        return Outcome(Kind.CRASHED, detail, failures)
    if all(f.reasons for f in failures):
        return Outcome(Kind.REFUSED, f"{', '.join(first.reasons)}: {first.message[:1500]}", failures)
    return Outcome(Kind.RAISED, detail, failures)
