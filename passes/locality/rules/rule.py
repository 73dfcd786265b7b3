"""Locality rules: each is a line of `table`, the ways that some ops may go.

rows_along, has_row, spread       where the tokens of a tensor are: which of its rows hold one, and along which dim
Alone, MovesRows, OverRanks       ways
Rule, rule, rows, refused         a line of the table
on_rows, over, …                  parts that lines are made of
vouched_state, vouched_calls      ops that act on each token alone by the user's word (`Sharding.local_ops`)
drawn                             random numbers that each rank draws for its own tokens (`Sharding.random`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any

import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.nodes import value_of
from cp_rewrite.passes.locality.call import Call
from cp_rewrite.passes.locality.claims import (
    REPLICATED,
    B,
    Dims,
    Fewer,
    Mixes,
    Moved,
    Partial,
    Rows,
    T,
    TensorState,
    fewer,
    plain,
    with_fewer,
)
from cp_rewrite.passes.values.edits import Ranks, RunOverRanks
from cp_rewrite.planning.plan_input import TOKEN_INDEX, PlanInput
from cp_rewrite.refusal import Reason
from cp_rewrite.torch_internals import OpOverload, OpOverloadPacket


def can_spread(rows: Rows) -> bool:
    """True of rows that are not in an order of their own, and whose values are no places of rows."""
    factors = [factor for dim in rows.dims for factor in dim or () if not (isinstance(factor, Fewer) and factor.by > 0)]
    return (
        rows.shard_rows is None
        and not rows.key
        and all(factor in (B, T) or isinstance(factor, int) for factor in factors)
    )


def rows_along(call: Call, dim: int, some: bool = False) -> tuple[Rows, int]:
    """The rows of an op's first tensor, and the dim, where tokens stand in it alone, in their order.

    Args:
        some: the last ones may be missing, of one row of the batch or of each by itself.
    Raises:
        Mixes: they do not, rows of the batch have no dim of their own, or the op writes.
    """
    rows = call.rows(call.first)
    dim = dim % max(call.first.ndim, 1)
    known = ((T,), (B, T)) if rows is None or not some or fewer(rows.dims) <= 0 else ((Fewer(fewer(rows.dims)),),)
    if rows is None or not can_spread(rows) or rows.dims[dim] not in known or call.written:
        raise Mixes(f"{call.name} of something else than tokens")
    if any(entry not in (None, (B,)) for i, entry in enumerate(rows.dims) if i != dim):
        raise Mixes(f"{call.name} of rows of the batch that are no dim of their own")
    return rows, dim


def has_row(ranks: Ranks, dims: Dims) -> Tensor:
    """Which local rows hold one of a tensor with these dims, as `spread`."""
    more = (ranks.token_index, ranks.row_tokens) if fewer(dims) else ()
    return spread(has_row_BT(dims, ranks.has_token, *more), dims)


def has_row_BT(
    dims: Dims, has_token_BT: Tensor, index_BT: Tensor | None = None, row_tokens: Tensor | None = None
) -> Tensor:
    """(B, T) which local rows hold one of a tensor with these dims; one of fewer tokens needs the last two."""
    if index_BT is None or row_tokens is None:
        return has_token_BT
    return has_token_BT & (index_BT < row_tokens - fewer(dims))


def reads_of(dims: Dims) -> tuple[PlanInput, ...]:
    """The plan's tensors that `has_row` reads beside `READ`."""
    return (TOKEN_INDEX,) if fewer(dims) else ()


def spread(has_token_BT: Tensor, dims: Dims) -> Tensor:
    """(B, T) as a tensor that broadcasts against one of these dims.

    (B,) (T,) ·     (B, T, 1)
    (B, T) ·        (B * T, 1)
    (T, 4)          (T * 4,)
    """
    dims = with_fewer(dims, 0)
    while dims and dims[0] is None:  # broadcasting adds them
        dims = dims[1:]
    factors = [factor for dim in dims for factor in dim or (1,)]
    axes = [factor for factor in factors if factor in (B, T)]
    # Without a batch axis the tensor is the same for all rows of the batch.
    x = has_token_BT[0] if axes == [T] else has_token_BT if axes == [B, T] else has_token_BT.t()
    for place, factor in enumerate(factors):
        if factor not in axes:
            x = x.unsqueeze(place)
    return _joined(x, factors, dims)


def _joined(x: Tensor, factors: Sequence[Any], dims: Dims) -> Tensor:
    """Every factor has a dim of `x`: those that stand in one of `dims` become one."""
    if any(dim is not None and len(dim) > 1 for dim in dims):
        sizes = [factor if isinstance(factor, int) else -1 for factor in factors]
        x = x.expand(sizes) if any(size > 1 for size in sizes) else x
    for place, dim in enumerate(dims):
        if dim is not None and len(dim) > 1:
            x = x.flatten(place, place + len(dim) - 1)
    return x


States = TensorState | Sequence[TensorState]
"""States of an op's results; one state stands for all of them."""
Transfer = Callable[[Call], States]
"""The states of an op's results from those of its operands. Raises Mixes where the op is not the same on a shard."""
RowsTransfer = Callable[[Call, Rows], States]
"""A Transfer of an op whose first tensor holds token rows."""
Resolve = Callable[[Call], tuple[States, RunOverRanks]]
"""The states of an op's results where it runs over the tokens of all ranks, and what runs then. Raises Mixes."""
Mixing = Callable[[Call], Iterable[tuple[int, str]]]
"""(dim, verb) of each dim of the first tensor whose entries an op mixes: no axis of the batch may be there."""


class Takes(Flag):
    """Flags of what a rule takes beside token rows and what all ranks have alike. Without one the op is refused."""

    NOTHING = 0
    SUMS = auto()
    """Per-rank parts of sums."""
    SIZES = auto()
    """Numbers made from the token count: they are sizes, or the rule looks at them."""
    UNCUT = auto()
    """Operands none of which is cut: the op may make token rows from sizes. Other rules are not asked then."""
    POSITIONS = auto()
    """Positions. Of other rules those that the result no longer holds count as used."""
    GROUPS = auto()
    """Sizes of groups of sorted rows."""


@dataclass(frozen=True)
class Alone:
    """A way of an op: by itself, on a rank's own tokens. gives: the states of its results. takes: what it may get."""

    gives: Transfer
    takes: Takes = Takes.NOTHING


@dataclass(frozen=True)
class MovesRows:
    """A way of an op that moves tokens: nothing runs, what the result is made of is noted."""

    gives: Callable[[Call], Moved]


@dataclass(frozen=True)
class OverRanks:
    """A way of an op over the tokens of all ranks. gives: the states of its results, and what runs in its place."""

    gives: Resolve


Way = Alone | MovesRows | OverRanks


@dataclass(frozen=True)
class Rule:
    """ops: their names, apart by spaces. ways: in which they may be the same on a shard as on one process, the first
    that holds is taken."""

    ops: str
    ways: tuple[Way, ...]


def rule(ops: str, *ways: Way) -> Rule:
    return Rule(ops, ways)


def rows(gives: RowsTransfer, takes: Takes = Takes.NOTHING, mixes: Mixing | None = None, others: str = "") -> Alone:
    """The way of an op that works on the rows of its first tensor; arguments as of `Alone` and `on_rows`."""
    return Alone(on_rows(gives, mixes, others), takes)


def refused(why: str, reason: Reason = Reason.TOKEN_MIXING) -> Alone:
    """The way of ops that are not the same on a shard: it refuses them."""

    def gives(call: Call) -> TensorState:
        raise Mixes(f"{call.name} {why}", reason)

    return Alone(gives)


def on_rows(gives: RowsTransfer, mixes: Mixing | None = None, others: str = "") -> Transfer:
    """A Transfer that looks at the rows of the first tensor only. A per-rank part of a sum stays one.

    Args:
        gives: the states of the results.
        mixes: the dims of the first tensor that may hold no tokens and no rows of the batch.
        others: what is wrong where the first tensor has no rows, or another is not the same on all ranks.
    """

    def transfer(call: Call) -> States:
        state = call.state(call.first)
        if others and not (isinstance(state, Rows) and all(call.state(x) is REPLICATED for x in call.tensors[1:])):
            raise Mixes(others.format(op=call.name), Reason.NO_LOCALITY_RULE)
        if not isinstance(state, Rows):
            assert isinstance(state, Partial), call.func
            return state
        for dim, verb in mixes(call) if mixes else ():
            call.refuse_axis(state, dim, verb)
        return gives(call, state)

    return transfer


def unchanged(call: Call, x: Rows) -> Rows:
    """The same rows with the same values."""
    return x


def same_dims(call: Call, x: Rows) -> Rows:
    """The same rows with other values."""
    return plain(x)


def given_dims(call: Call) -> list[int]:
    """The dims that the arguments name; all of them where they name none."""
    ndim = call.first.ndim
    given = call.arg("dim", "dims", "axis")
    if ndim == 0:
        return []
    dims = [given] if isinstance(given, int) else list(given or ())
    return [dim % ndim for dim in dims] if dims else list(range(ndim))


def over(verb: str) -> Mixing:
    """The op mixes the entries of the dims that its arguments name."""
    return lambda call: [(dim, verb) for dim in given_dims(call)]


def last_dim(verb: str) -> Mixing:
    """The op mixes the entries of the last dim."""
    return lambda call: [(call.first.ndim - 1, verb)]


def vouched_name(func: OpOverload) -> str:
    """The name a user vouches for an op by: `ns::op`."""
    return func._schema.name


def vouched_state(call: Call, out: Tensor) -> TensorState:
    """Token dim of a result: that of an input whose token and batch dims it has, or else the one dim of T entries."""
    sizes = call.sizes(out)
    inputs = [tensor for tensor in call.tensors if call.rows(tensor)]
    for tensor in inputs:
        entries = call.entries(tensor)
        if all(dim is None or (i < len(sizes) and sizes[i] == size) for i, (dim, size) in enumerate(entries)):
            dims = [dim for dim, _ in entries[: len(sizes)]]
            return Rows((*dims, *[None] * (len(sizes) - len(dims))))
    if inputs and (dims := call.extents.label(sizes)) is not None:
        return Rows(dims)
    raise Mixes(f"{vouched_name(call.func)} is vouched for, but its result of shape {tuple(sizes)} has no token dim")


def vouched_calls(
    nodes: Sequence[fx.Node], states: Mapping[fx.Node, Any], names: Sequence[str]
) -> dict[str, list[int | None]]:
    """The token dims of the tensors that the first call of each op is given: token rows, and what all ranks have."""
    found: dict[str, list[int | None]] = {}
    for node in nodes:
        name = _called(node.target)
        if name not in names or name in found:
            continue
        given: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), given.append)
        operands = [states.get(n) for n in given if isinstance(value_of(n), Tensor)]
        if all(isinstance(state, Rows) or state is REPLICATED for state in operands):
            found[name] = [state.token_dim if isinstance(state, Rows) else None for state in operands]
    return {name: dims for name, dims in found.items() if any(dim is not None for dim in dims)}


def _called(target: Any) -> str:
    """The name of an op, `ns::op`; "" of what is none."""
    if isinstance(target, OpOverloadPacket):
        return target._qualified_op_name
    return vouched_name(target) if isinstance(target, OpOverload) else ""


_OF_SIZES = frozenset({"rand", "randn", "randint"})
_PER_ENTRY = frozenset(
    {"native_dropout", "bernoulli", "rand_like", "randn_like", "randint_like", "uniform", "normal", "exponential"}
    | {"random", "geometric", "cauchy", "log_normal", "poisson", "normal_functional", "rrelu_with_noise"}
)


def drawn(call: Call) -> States:
    """Draws of sizes that count tokens, or of rows, entry by entry, are rows. multinomial draws from ordinary dims.

    A draw for every token, as dropout makes it, is as good from any generator. One that all tokens share (dropout on a
    weight, noise per expert) must be the same on all ranks, and is refused.
    """
    if call.name in _OF_SIZES:
        dims = call.extents.label(call.sizes(call.outs[0]))
        if dims is not None:
            return Rows(dims)
    tensors = [x for x in call.tensors if call.rows(x)]
    shared = [x for x in call.tensors if call.state(x) is not REPLICATED and not call.rows(x)]
    if tensors and not shared and (call.name in _PER_ENTRY or call.name == "multinomial"):
        call.use_positions(*tensors)
        rows = call.rows(tensors[0])
        assert rows is not None
        if call.name == "multinomial":
            call.refuse_axis(rows, call.first.ndim - 1, "draws from")
        if any(call.rows(x) is None or call.entries(x) != call.entries(tensors[0]) for x in call.tensors):
            raise Mixes(f"{call.name} draws for token rows by something that is not cut like them", Reason.DROPOUT)
        return Rows(rows.dims, attended=any(r.attended for x in tensors if (r := call.rows(x))))
    raise Mixes(
        f"{call.name} draws random numbers that all ranks share, which differ between them: draw them outside of the "
        "model, and pass them in",
        Reason.DROPOUT,
    )
