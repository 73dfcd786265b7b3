"""Recurrences over the pieces of rows that a rank has: states enter pieces from the ranks that have what is before.

Shapes: R = B T_l local rows; N, S, V, F as in `planning/token_reads/states.py`, which draws the tables.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, register_autograd

from cp_rewrite.kernels.nvtx import nvtx
from cp_rewrite.ops.schemas import bind, gradients, keep, kept
from cp_rewrite.planning.plan_input import STATES
from cp_rewrite.planning.token_reads.chunks import CHUNK

from . import by_kernels
from .fold import fold
from .kinds import INPUTS, Options, chunk_maps, fake_out, inputs_of, options_of, out_dtype, state_shapes, to_rows, wide
from .maps import Maps, Read, compose, run_chains
from .trial import right_kernels

_ops: Any = torch.ops.cp_rewrite
_vjp: Any = torch.func.vjp  # autograd has no place inside of an op
_Given = tuple[Tensor, Tensor, Tensor, list[Tensor]]


@custom_op("cp_rewrite::gated_delta_rule_on_pieces", mutates_args=())
def gated_delta_rule_on_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    tables: list[Tensor],
    scale: float,
    l2norm: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """This rank's rows of `gated_delta_rule`; 0 in rows of no piece, which are not read.

    Args:
        q, k, v, g, beta, scale, l2norm: as there, with T_l rows.
        tables: of `STATES`, in order. group: name of the process group; "" for one rank.
    Returns:
        out (B, T_l, H, V) in q's dtype; and for the backward states that enter the cut pieces (N, H, K, V) and what
        moves them (N, H, K, K), in fp32 (fp64), and what kernels keep: none where there are none.
    """
    return _forward("gated_delta_rule", [q, k, v, g, beta], tables, Options(scale, l2norm), group)


@custom_op("cp_rewrite::kimi_delta_on_pieces", mutates_args=())
def kimi_delta_on_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    tables: list[Tensor],
    scale: float,
    l2norm: bool,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """This rank's rows of `kimi_delta`, as `gated_delta_rule_on_pieces`."""
    return _forward("kimi_delta", [q, k, v, g, beta], tables, Options(scale, l2norm), group)


@custom_op("cp_rewrite::ssd_on_pieces", mutates_args=())
def ssd_on_pieces(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, tables: list[Tensor], group: str
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """This rank's rows of `ssd`, as `gated_delta_rule_on_pieces`: states (N, H, N_state, P), moved by (N, H, 1, 1)."""
    return _forward("ssd", [x, dt, A, B, C], tables, Options(), group)


@custom_op("cp_rewrite::selective_scan_on_pieces", mutates_args=())
def selective_scan_on_pieces(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, tables: list[Tensor], group: str
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """This rank's rows of `selective_scan`, as `gated_delta_rule_on_pieces`: states and what moves them (N, E,
    N_state)."""
    return _forward("selective_scan", [x, dt, A, B, C], tables, Options(), group)


def _forward(kind: str, inputs: list[Tensor], tables: list[Tensor], how: Options, group: str) -> _Given:
    t = _named(tables)
    if kernels := right_kernels(kind, inputs, len(t.runs), how):
        return by_kernels.forward(kernels, kind, inputs, t, how, group)
    maps, read = chunk_maps(kind, inputs, t.chunk_rows, CHUNK, how)
    own = _summaries(maps, t)
    with nvtx("states"):
        entries = fold(own, t, "", group)
    states, _ = _run(maps, t, entries)
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


def _run(maps: Maps, t: SimpleNamespace, entries: Tensor) -> tuple[Tensor, Tensor]:
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
    out, of_entries = _vjp(lambda entered: _out(read, _run(maps, t, entered)[0], inputs[0], t), entries)
    dout = dout.to(out.dtype)
    (d_entries,) = of_entries(dout)
    with nvtx("states_backward"):
        d_ends = fold(Maps(moves.mT if maps.dense else moves, d_entries, maps.dense), t, "_back", group)

    def again(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        maps, read = chunk_maps(kind, leaves, t.chunk_rows, CHUNK, how)
        states, ends = _run(maps, t, entries)
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


def _register(kind: str) -> None:
    """Fake and autograd of a recurrence on pieces."""
    name = f"{kind}_on_pieces"
    named = getattr(_ops, name).default

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: _Given) -> None:
        x = bind(named, inputs)
        _, x.entries, x.moves, x.kept = output
        ctx.mark_non_differentiable(x.entries, x.moves, *x.kept)
        if x.kept and x.l2norm:  # the kernels' backward reads these in the place of what they came from
            x.q, _, x.k, *_ = x.kept
        keep(ctx, **vars(x))

    def backward(ctx: Any, dout: Tensor, *_: Any) -> tuple[Any, ...]:
        x = kept(ctx)
        how = options_of(x)
        found = _ops.states_on_pieces_backward(
            dout, x.entries, x.moves, x.kept, inputs_of(kind, x), x.tables, kind, how.scale, how.l2norm, x.group
        )
        return gradients(named, x, **dict(zip(INPUTS[kind], found, strict=True)))

    torch.library.register_fake(f"cp_rewrite::{name}", partial(_fake, kind))
    register_autograd(f"cp_rewrite::{name}", backward, setup_context=setup_context)


for _kind in INPUTS:
    _register(_kind)
