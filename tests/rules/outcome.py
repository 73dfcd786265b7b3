"""The outcome of a trial: right, refused (perhaps needlessly), or not what was proven."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.batch.active import ActivePlan
from cp_rewrite.batch.handed import Handed
from cp_rewrite.diagnose.check import ThreadSharding, rank, thread_group
from cp_rewrite.passes.locality.claims import AtMost
from cp_rewrite.passes.locality.walk import check_locality
from cp_rewrite.passes.rewrite.rewrite_sites import rewrite_sites
from cp_rewrite.passes.values.edits import Locality
from cp_rewrite.refusal import RewriteRefused

from .claims import Claims
from .cuts import Axes, Cuts
from .program import SHARDING, NotTried, Program
from .samples import Sample

LIMIT = 1e-6
"""Relative norm error of a result or a gradient in fp64."""


@dataclass(frozen=True)
class Outcome:
    """kind: "right", "refused", "missing" (refused, though the op is the same on ranks), "wrong" or "raised"."""

    kind: str
    why: str = ""


@dataclass(frozen=True)
class Results:
    """Results of one process or of a rank. gradients: of each input; None: it has none."""

    outs: Sequence[Tensor]
    gradients: Sequence[Tensor | None]


@lru_cache
def sharding_of(ranks: int) -> ThreadSharding:
    return ThreadSharding.like(replace(SHARDING, mesh=ranks))


def outcome(sample: Sample, claims: Claims, ranks: int = 2, sized: bool = False) -> Outcome:
    """Prove, rewrite and run a sample's op on ranks, and compare with one process.

    Raises:
        NotTried: it does not run on one process or on symbolic sizes, or decides by the number of tokens.
    """
    cuts = Cuts(claims.tokens, claims.rows, ranks)
    if cuts.local < 2:
        raise NotTried("torch fixes sizes of 1")
    torch.manual_seed(0)
    try:
        program = Program(sample, claims, cuts, sized)
        expected = run(program.gm, program.inputs(None), lambda out, i: weights(out, i))
    except Exception as error:
        raise NotTried(str(error)) from error
    if not program.guards_hold():
        raise NotTried("decides by the number of tokens")
    state = program.state(sharding_of(ranks))
    found = check_locality(program.gm, state.sharding, (), state.tokens)
    if found.refusals:
        missing = _missing(program, expected, cuts)
        return Outcome("missing" if missing else "refused", f"{missing}: {found.refusals[0].detail}")
    if found.fill_sums and cuts.plan.fill:
        return Outcome("refused", "sums over tokens whatever fills ranks up")  # an error of the batch
    axes, fills = [_axes(found, i, x, cuts) for i, x in enumerate(expected.outs)], _fills(program, found)
    try:
        state = rewrite_sites(replace(state, locality=found))

        def on_rank() -> Results:
            plan = ActivePlan(Handed(state.sharding, cuts.plan), state.device)
            inputs, tables = program.inputs(rank()), [plan.tensor(key) for key in state.inputs]
            return run(program.gm, inputs, lambda out, i: _local(weights(expected.outs[i], i), axes[i], out), tables)

        def _local(whole: Tensor, axes: Axes | None, like: Tensor) -> Tensor:
            return whole if axes is None else cuts.cut_like(whole, axes, like, rank())

        with thread_group(ranks) as play:
            results: list[Results] = play(on_rank)
    except (RewriteRefused, ValueError) as refused:  # a batch that the model is not right for is an error of it
        return Outcome("refused", str(refused))
    except Exception as error:
        return Outcome("raised", f"{type(error).__name__}: {error}")
    wrong = _difference(results, expected, axes, fills, found, cuts) or _gradients(results, expected, program, cuts)
    return Outcome("wrong", wrong) if wrong else Outcome("right")


def weights(out: Tensor, place: int) -> Tensor:
    """The gradient of a result of one process."""
    return torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(place))


def run(
    gm: Callable[..., Any],
    inputs: Sequence[Tensor],
    gradient: Callable[[Tensor, int], Tensor],
    tables: Sequence[Tensor] = (),
) -> Results:
    """The graph, forward and backward. gradient: of a result, by its place."""
    outs = list(gm(*inputs, *tables))
    differentiable = [(i, out) for i, out in enumerate(outs) if out.requires_grad]
    trained = [x for x in inputs if x.requires_grad]
    if not differentiable:
        return Results([x.detach() for x in outs], [None] * len(inputs))
    grads = iter(
        torch.autograd.grad(
            [x for _, x in differentiable], trained, [gradient(x, i) for i, x in differentiable], allow_unused=True
        )
    )
    return Results([x.detach() for x in outs], [next(grads) if x.requires_grad else None for x in inputs])


def _axes(found: Locality, place: int, expected: Tensor, cuts: Cuts) -> Axes | None:
    """Axes of a result by the proof; None: it has no tokens."""
    dim, axes = found.outputs[place], found.axes[place]
    return cuts.axes(expected.ndim, dim) if dim is not None else axes


def _fills(program: Program, found: Locality) -> list[Any]:
    """The number that the proof finds in rows without a token of each result; None: it finds none."""
    fills = [getattr(found.states.get(leaf), "fill", None) for leaf in program.leaves]
    return [None if isinstance(fill, AtMost) else fill for fill in fills]


def _difference(
    results: Sequence[Results],
    expected: Results,
    axes: Sequence[Axes | None],
    fills: Sequence[Any],
    found: Locality,
    cuts: Cuts,
) -> str:
    """The first result that is not as it was proven, in words; "": none."""
    for i, whole in enumerate(expected.outs):
        parts = [each.outs[i] for each in results]
        if any(x.dtype != whole.dtype for x in parts):
            return f"result {i} is of {parts[0].dtype}, on one process of {whole.dtype}"
        about = axes[i]
        if about is not None:
            if not close(cuts.joined(parts, about), cuts.front(whole, about, cuts.tokens)):
                return f"result {i} is not rows {about} of one process's"
            fill = [cuts.fill(x, about, place) for place, x in enumerate(parts)]
            if fills[i] is not None and any(bool((x != fills[i]).any()) for x in fill):
                return f"result {i} holds something else than {fills[i]} in rows without a token"
        elif found.parts[i]:
            if not close(sum(parts[1:], parts[0]), whole):
                return f"result {i} is no part of one process's"
        elif not all(close(x, whole) for x in parts):
            return f"result {i} is not that of one process"
    return ""


def _gradients(results: Sequence[Results], expected: Results, program: Program, cuts: Cuts) -> str:
    for i, (whole, dim) in enumerate(zip(expected.gradients, program.token_dims, strict=True)):
        parts = [each.gradients[i] for each in results]
        given = [x for x in parts if x is not None]
        if whole is None or not given:
            if any(bool(x.any()) for x in [*given, *([whole] if whole is not None else [])]):
                return f"input {i} has a gradient on {'ranks' if given else 'one process'} only"
            continue
        zero = torch.zeros_like(given[0])
        parts = [zero if x is None else x for x in parts]
        if dim is None:
            if not close(sum(parts[1:], parts[0]), whole):
                return f"gradients of input {i} do not add up to one process's"
            continue
        axes = cuts.axes(whole.ndim, dim)
        if not close(cuts.joined(parts, axes), cuts.front(whole, axes, cuts.tokens)):
            return f"the gradient of input {i} is not rows of one process's"
        fill = torch.cat([cuts.fill(x, axes, place) for place, x in enumerate(parts)])
        if fill.nan_to_num(nan=0.0).any():  # nan where the op is not defined: that is no silence
            return f"rows without a token of input {i} get a gradient"
    return ""


def close(actual: Tensor, expected: Tensor) -> bool:
    """Equal, or for floats within LIMIT; nan equals nan."""
    if actual.shape != expected.shape:
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(actual, expected)
    special = ~expected.isfinite()
    if not torch.equal(special, ~actual.isfinite()) or not torch.equal(
        actual[special].nan_to_num(nan=7.0), expected[special].nan_to_num(nan=7.0)
    ):
        return False
    a, b = actual[~special], expected[~special]
    return bool((a - b).norm() <= LIMIT * b.norm().clamp(min=1.0))


def _missing(program: Program, expected: Results, cuts: Cuts) -> str:
    """Claims that hold of the op's own results on ranks, unchanged: rows, parts or the same; "" if one has none."""
    try:
        results = [run(program.gm, program.inputs(place), lambda out, i: out) for place in range(cuts.ranks)]
    except Exception:
        return ""
    found = []
    for i, whole in enumerate(expected.outs):
        parts = [each.outs[i] for each in results]
        how = _relation(parts, whole, cuts)
        if not how:
            return ""
        found.append(how)
    return ", ".join(found)


def _relation(parts: Sequence[Tensor], whole: Tensor, cuts: Cuts) -> str:
    if all(close(x, whole) for x in parts):
        return "the same"
    for dim, size in enumerate(whole.shape):
        shape = [cuts.local if i == dim else n for i, n in enumerate(whole.shape)]
        rows = cuts.rows == 1 or (dim and whole.shape[dim - 1] == cuts.rows)
        if size == cuts.tokens and rows and all(list(x.shape) == shape for x in parts):
            axes = cuts.axes(whole.ndim, dim)
            if close(cuts.joined(parts, axes), cuts.front(whole, axes, cuts.tokens)):
                return f"rows({dim})"
    added = whole.dtype.is_floating_point and all(x.shape == whole.shape for x in parts)
    return "parts" if added and close(sum(parts[1:], parts[0]), whole) else ""
