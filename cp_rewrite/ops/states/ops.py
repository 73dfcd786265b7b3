"""Recurrences as ops of the captured graph, forward and backward: over the pieces of rows that a rank has
(`_on_pieces`), where states enter pieces from the ranks that have what is before; and over whole rows, what one process
computes (`_whole`).

Shapes: B rows of T tokens, T_l local rows of each on a rank, R = B T_l; Hk heads of queries and keys, H heads, K and V
head dims; P, G, N, E as in `maps.py`; D sequences. Of pieces N, S, V, F as in `planning/states.py`, which draws the
tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.library import custom_op

from cp_rewrite.kernels.cuda import nvtx
from cp_rewrite.ops.schemas import bind, gradients, keep, kept
from cp_rewrite.planning.intervals import CHUNK, chunk_counts, chunk_rows
from cp_rewrite.planning.plan_input import STATES

from . import by_kernels
from .maps import (
    INPUTS,
    Maps,
    Options,
    Read,
    chunk_maps,
    compose,
    fake_out,
    fold,
    inputs_of,
    options_of,
    out_dtype,
    run_chains,
    state_shapes,
    to_rows,
    wide,
)
from .trial import right_kernels

_ops: Any = torch.ops.cp_rewrite
_vjp: Any = torch.func.vjp  # autograd has no place inside of an op
_Given = tuple[Tensor, Tensor, Tensor, list[Tensor]]


def _define(
    kind: str, form: str, tables: str, last: str, results: str, run: Any, fake: Any, save: Any, back: Any
) -> None:
    """Declare the op of a recurrence: its inputs, `tables`, the options of delta rules, `last`.

    Args:
        form: end of its name. run, back: what it gives, and gradients of its inputs, by its arguments by name.
        save: adds of its results what `back` reads; gives those without gradients.
    """
    inputs = "".join(f"Tensor {name}, " for name in INPUTS[kind])
    options = ", float scale, bool l2norm" if INPUTS[kind][0] == "q" else ""
    schema = f"({inputs}{tables}{options}{last}) -> {results}"

    @custom_op(f"cp_rewrite::{kind}{form}", mutates_args=(), schema=schema)
    def op(*args: Any) -> Any:
        return run(kind, bind(named, args))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x = bind(named, inputs)
        ctx.mark_non_differentiable(*save(x, output))
        keep(ctx, **vars(x))

    def backward(ctx: Any, dout: Tensor, *_: Any) -> tuple[Any, ...]:
        x = kept(ctx)
        return gradients(named, x, **dict(zip(INPUTS[kind], back(kind, x, dout), strict=True)))

    named = op._opoverload
    op.register_fake(partial(fake, kind))
    op.register_autograd(backward, setup_context=setup_context)


def _on_pieces(kind: str, x: SimpleNamespace) -> _Given:
    """This rank's rows of `_whole`, of inputs with T_l rows; 0 in rows of no piece, which are not read.

    Args:
        x: beside the inputs and options, `tables` of `STATES`, in order, and the `group`; "" for one rank.
    Returns:
        out (B, T_l, …); and for the backward states that enter the cut pieces and what moves them, in fp32 (fp64), and
        what kernels keep: none where there are none. Delta rules: (N, H, K, V), moved by (N, H, K, K); `ssd`: (N, H,
        N_state, P), moved by (N, H, 1, 1); `selective_scan`: both (N, E, N_state).
    """
    inputs, how, t = inputs_of(kind, x), options_of(x), _named(x.tables)
    if kernels := right_kernels(kind, inputs, len(t.runs), how):
        return by_kernels.forward(kernels, kind, inputs, t, how, x.group)
    maps, read = chunk_maps(kind, inputs, t.chunk_rows, CHUNK, how)
    own = _summaries(maps, t)
    with nvtx("states"):
        entries = fold(own, t, "", x.group)
    states, _ = _run_pieces(maps, t, entries)
    out = _out(read, states, inputs[0], t).to(out_dtype(kind, inputs[0].dtype))
    return out, entries, own.move, by_kernels.not_kept(kind, inputs, how.l2norm)


def _named(tables: list[Tensor]) -> SimpleNamespace:
    return SimpleNamespace(**{tensor.name: table for tensor, table in zip(STATES, tables, strict=True)})


def _summaries(maps: Maps, t: SimpleNamespace) -> Maps:
    """Summaries of N cut pieces; zeros for those that end their sequence, whose summaries nobody reads."""
    found = compose(maps.take(t.summed_chunks), t.summed_levels.tolist())
    missing = t.cut_pieces.numel() - found.add.shape[0]
    rest = [x.new_zeros(missing, *x.shape[1:]) for x in (found.move, found.add)]
    return Maps(torch.cat([found.move, rest[0]]), torch.cat([found.add, rest[1]]), maps.dense)


def _run_pieces(maps: Maps, t: SimpleNamespace, entries: Tensor) -> tuple[Tensor, Tensor]:
    """(C, *state) before each chunk, (n, *state) at the end of each of the rank's pieces."""
    levels = t.chunk_levels.tolist()
    return run_chains(maps, levels, _placed(entries, t, levels[0]))


def _placed(cut: Tensor, t: SimpleNamespace, count: int) -> Tensor:
    """(count, …) of all pieces of the rank: those of N cut ones at their numbers, 0 of others."""
    whole = cut.new_zeros(count + 1, *cut.shape[1:])
    return whole.index_copy(0, torch.where(t.cut_pieces < 0, count, t.cut_pieces).long(), cut)[:count]


def _out(read: Read, states: Tensor, like: Tensor, t: SimpleNamespace) -> Tensor:
    shape = like.shape[:2]
    return to_rows(read(states), t.chunk_rows, shape[0] * shape[1]).unflatten(0, shape)


@custom_op("cp_rewrite::states_on_pieces_backward", mutates_args=())
def states_on_pieces_backward(
    dout: Tensor,
    entries: Tensor,
    moves: Tensor,
    kept: list[Tensor],
    inputs: list[Tensor],
    tables: list[Tensor],
    kind: str,
    scale: float,
    l2norm: bool,
    group: str,
) -> list[Tensor]:
    """Gradients of all inputs of an op on pieces, computed again from them; of A this rank's part.

    What a piece's results say of the state that enters it is folded from behind first: it gives what later pieces,
    of any rank, say of the state at each cut piece's end.

    Args:
        entries, moves, kept: what the op gave. kind: its name without `_on_pieces`.
    """
    t, how = _named(tables), Options(scale, l2norm)
    if kernels := right_kernels(kind, inputs, len(t.runs), how):
        return by_kernels.backward(kernels, kind, dout, entries, moves, kept, inputs, t, how, group)
    maps, read = chunk_maps(kind, inputs, t.chunk_rows, CHUNK, how)
    out, of_entries = _vjp(lambda entered: _out(read, _run_pieces(maps, t, entered)[0], inputs[0], t), entries)
    dout = dout.to(out.dtype)
    (d_entries,) = of_entries(dout)
    with nvtx("states_backward"):
        d_ends = fold(Maps(moves.mT if maps.dense else moves, d_entries, maps.dense), t, "_back", group)

    def again(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        maps, read = chunk_maps(kind, leaves, t.chunk_rows, CHUNK, how)
        states, ends = _run_pieces(maps, t, entries)
        return _out(read, states, leaves[0], t), ends

    (_, ends), vjp = _vjp(again, *inputs)
    return [x.contiguous() for x in vjp((dout, _placed(d_ends, t, len(ends))))]


@states_on_pieces_backward.register_fake
def _(dout: Tensor, entries: Tensor, moves: Tensor, kept: list[Tensor], inputs: list[Tensor], *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in inputs]


def _fake(kind: str, *inputs: Any) -> _Given:
    state, move = state_shapes(kind, inputs)
    count, dtype = inputs[5][_CUT].shape[0], wide(inputs[0].dtype)
    states, moves = (inputs[0].new_empty([count, *shape], dtype=dtype) for shape in (state, move))
    how = Options(*inputs[6:8]) if INPUTS[kind][0] == "q" else Options()
    return fake_out(kind, *inputs), states, moves, by_kernels.not_kept(kind, inputs[:5], how.l2norm)


_CUT = [tensor.name for tensor in STATES].index("cut_pieces")


def _save_states(x: SimpleNamespace, output: _Given) -> tuple[Tensor, ...]:
    _, x.entries, x.moves, x.kept = output
    without = (x.entries, x.moves, *x.kept)
    if x.kept and x.l2norm:  # the kernels' backward reads these in the place of what they came from
        x.q, _, x.k, *_ = x.kept
    return without


def _back_on_pieces(kind: str, x: SimpleNamespace, dout: Tensor) -> list[Tensor]:
    how = options_of(x)
    return _ops.states_on_pieces_backward(
        dout, x.entries, x.moves, x.kept, inputs_of(kind, x), x.tables, kind, how.scale, how.l2norm, x.group
    )


def _whole(kind: str, x: SimpleNamespace) -> Tensor:
    """A recurrence over whole rows from a state of 0, computed in fp32 (fp64).

        gated_delta_rule   (B, T, H, V) in q's dtype: of `kernels/states/delta.py`. q, k: (B, T, Hk, K). v: (B, T, H,
                           V), H a multiple of Hk. g: (B, T, H), logarithms. beta: (B, T, H)
        kimi_delta         the same with a decay for each channel: g (B, T, H, K)
        ssd                (B, T, H, P) in fp32 (fp64), without a skip of x. x: (B, T, H, P). dt: (B, T, H), after all
                           that is done to it. A: (H,). B, C: (B, T, G, N), H a multiple of G
        selective_scan     (B, T, E) in x's dtype, without skip and gate. x, dt: (B, T, E). A: (E, N). B, C: (B, T, N)

    Args:
        x: beside the inputs: `offsets`, (D + 1,) int32, ascending from 0: sequence i has the rows [offsets[i],
            offsets[i + 1]) of all B T; rows behind the last give 0. None: each of the B rows is one sequence. Of delta
            rules `scale`, of q after its norm, and `l2norm`: q and k are divided by their norms over K.
    """
    inputs, how = inputs_of(kind, x), options_of(x)
    bounds = _bounds(inputs[0], x.offsets)
    if kernels := right_kernels(kind, inputs, len(bounds) - 1, how):
        return by_kernels.whole(kernels, kind, inputs, bounds, how)
    out = _run(kind, inputs, *_chunk_tables(inputs[0], bounds), how)
    return out.to(out_dtype(kind, inputs[0].dtype))


def _run(kind: str, inputs: Sequence[Tensor], rows: Tensor, levels: list[int], how: Options) -> Tensor:
    """(B, T, …), as wide as states are."""
    shape = inputs[0].shape[:2]
    maps, read = chunk_maps(kind, inputs, rows, CHUNK, how)
    states, _ = run_chains(maps, levels, maps.zeros(sum(levels[:1])))
    return to_rows(read(states), rows, shape[0] * shape[1]).unflatten(0, shape)


def _bounds(x: Tensor, offsets: Tensor | None) -> np.ndarray:
    """(D + 1,) int64 of the sequences of x (B, T, …).

    Raises:
        ValueError: offsets that do not ascend from 0, or go beyond the rows.
    """
    count = x.shape[0] * x.shape[1]
    bounds = np.arange(x.shape[0] + 1) * x.shape[1] if offsets is None else offsets.cpu().numpy().astype(np.int64)
    if bounds[0] or (np.diff(bounds) < 0).any() or bounds[-1] > count:
        raise ValueError(f"offsets must ascend from 0 up to at most {count} rows, got {bounds[:8].tolist()}…")
    return bounds


def _chunk_tables(x: Tensor, bounds: np.ndarray) -> tuple[Tensor, list[int]]:
    """`chunk_rows` of sequences of x."""
    starts, lengths = bounds[:-1], np.diff(bounds)
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    order = np.argsort(-chunk_counts(lengths), kind="stable")
    rows, levels = chunk_rows(starts[order], lengths[order])
    return torch.from_numpy(rows.reshape(-1)).to(x.device), levels.tolist()


@custom_op("cp_rewrite::states_backward", mutates_args=())
def states_backward(
    dout: Tensor, inputs: list[Tensor], offsets: Tensor | None, kind: str, scale: float, l2norm: bool
) -> list[Tensor]:
    """Gradients of all inputs of a recurrence, computed again from them. Args: kind: the op's name."""
    bounds, how = _bounds(inputs[0], offsets), Options(scale, l2norm)
    if kernels := right_kernels(kind, inputs, len(bounds) - 1, how):
        return by_kernels.whole_backward(kernels, kind, dout, inputs, bounds, how)
    rows, levels = _chunk_tables(inputs[0], bounds)
    out, vjp = _vjp(lambda *leaves: _run(kind, leaves, rows, levels, how), *inputs)
    return [x.contiguous() for x in vjp(dout.to(out.dtype))]


@states_backward.register_fake
def _(dout: Tensor, inputs: list[Tensor], *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in inputs]


def _whole_back(kind: str, x: SimpleNamespace, dout: Tensor) -> list[Tensor]:
    how = options_of(x)
    return _ops.states_backward(dout, inputs_of(kind, x), x.offsets, kind, how.scale, how.l2norm)


for _kind in INPUTS:
    _given = "(Tensor, Tensor, Tensor, Tensor[])"
    _define(
        _kind, "_on_pieces", "Tensor[] tables", ", str group", _given, _on_pieces, _fake, _save_states, _back_on_pieces
    )
    _define(_kind, "", "Tensor? offsets", "", "Tensor", _whole, fake_out, lambda x, output: (), _whole_back)
