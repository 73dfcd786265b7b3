"""What a locality rule is: a line of `table`, the ways that some ops may go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Flag, auto

from cp_rewrite.passes.locality.claims.dims import Mixes
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED, Moved, Partial, Rows, TensorState, plain
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.passes.values.resolution import RunOverRanks
from cp_rewrite.refusal import Reason

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
    """What a rule gets beside token rows and what is the same on all ranks. Without a flag the op is refused for it."""

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
    """Of ops that are not the same on a shard."""

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
