"""Findings of the locality check in a graph: what the rewrite does to it, and what each batch is asked.

Ranks, OfSums, Converted, …    what is put before the operands of a node, or runs inside of it
Step, Lowering                 a node taken apart into ATen ops, some of which are changed
Insert, PositionGenerator,     edits of a graph
RowPositions, NeighbourRead
Locality                       all findings
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.batch.marks import TokenAxes
from cp_rewrite.planning.plan_input import (
    HAS_TOKEN,
    IN_DOCUMENT,
    ROW_TOKENS,
    TOKEN_INDEX,
    TOKEN_ROWS,
    Neighbours,
    PlanInput,
)
from cp_rewrite.refusal import Reason, Refusal

_ops: Any = torch.ops.cp_rewrite


@dataclass(frozen=True)
class Ranks:
    """The ranks as an op that is made whole sees them: of the plan, it reads `READ` and what it names itself."""

    group: str
    world_size: int
    plan: Mapping[PlanInput, Tensor]

    @property
    def has_token(self) -> Tensor:
        """(B, T_l) bool: not of rows that fill the rank up."""
        return self.plan[HAS_TOKEN]

    @property
    def row_tokens(self) -> Tensor:
        """(1,) int64: the tokens of a row."""
        return self.plan[ROW_TOKENS]

    @property
    def token_index(self) -> Tensor:
        """(B, T_l) int64: the place in the global row of each local row's token."""
        return self.plan[TOKEN_INDEX]

    @property
    def joined_index(self) -> Tensor:
        """(B, T_l) int64: the same among the tokens of all rows of the batch, one behind another."""
        rows = torch.arange(self.token_index.shape[0], device=self.token_index.device)
        return self.token_index + (rows * self.row_tokens)[:, None]

    def local_rows(self, token: Tensor, row: Tensor | None, in_document: bool) -> Tensor:
        """The local rows of tokens of the global rows, -1 where another rank has them.

        Args:
            token: places in the global row, int64. row: the rows of the batch; None: `token` counts through them all.
            in_document: tokens of no document are an error.
        """
        documents = self.plan[IN_DOCUMENT] if in_document else None
        return _ops.local_rows.default(self.plan[TOKEN_ROWS], token, row, documents, self.has_token.shape[1])

    def rows_of_ranks(self, rows: Tensor) -> Tensor:
        """(P N, C) all ranks' rows (N, C), rank after rank; each rank knows the gradient of its own uses."""
        return _ops.rows_of_ranks.default(rows, self.world_size, self.group)

    def sum(self, part: Tensor) -> Tensor:
        """The whole of a part."""
        return _ops.sum_over_ranks.default(part, self.group)

    def most(self, part: Tensor) -> Tensor:
        """The largest of all ranks, of numbers that need no gradient."""
        return _ops.max_over_ranks.default(part, self.group)

    def largest(self, part: Tensor, count: Tensor) -> Tensor:
        """The largest of all ranks; `count` entries of this rank have the value of its part."""
        return _ops.largest_over_ranks.default(part, count, self.group)[0]


class OfSums(Enum):
    """Conversions of tensors that carry no tokens; the value is the op's name."""

    SUM = "sum_over_ranks"
    """A part becomes whole."""
    SUM_GRADIENT = "sum_gradient_over_ranks"
    """Whole, for a use that knows a part of the gradient on each rank."""
    SHARE_OUT = "share_out_gradient"
    """Whole, for a use that every rank has in full."""
    DIVIDE = "div"
    """The whole as equal parts, for a sum with other parts."""

    def __call__(self, x: Any, ranks: Ranks) -> Any:
        if self is OfSums.DIVIDE:
            return torch.div(x, ranks.world_size)
        op = getattr(_ops, self.value).default
        return op(x, ranks.world_size if self is OfSums.SHARE_OUT else ranks.group)


Conversion = Callable[[Any, Ranks], Any]
"""Makes another claim true of a tensor: (the tensor, `Ranks`) -> the tensor. Its attribute `reads` names what it needs
of the plan, `why` says what it does, for the report; `local`: it moves nothing between ranks, and done twice it does no
more."""


@dataclass(frozen=True)
class Converted:
    """Puts a tensor through conversions. group: of the ranks."""

    conversions: tuple[Conversion, ...]
    group: str
    world_size: int

    @property
    def reads(self) -> tuple[PlanInput, ...]:
        return tuple(dict.fromkeys(key for each in self.conversions for key in getattr(each, "reads", ())))

    def __call__(self, x: Any, *plan: Any) -> Any:
        ranks = Ranks(self.group, self.world_size, dict(zip(self.reads, plan, strict=True)))
        for conversion in self.conversions:
            x = conversion(x, ranks)
        return x


RunOverRanks = Callable[[Ranks, Any, dict[str, Any]], Any]
"""Runs an ATen op over the tokens of all ranks: (ranks, the op, its arguments by name) -> its results.

Its attribute `reads` names what it needs of the plan beside `READ`, `why` what it does, for the report."""
READ = (HAS_TOKEN, ROW_TOKENS)
"""The plan's tensors that all of them may read."""


@dataclass(frozen=True)
class Step:
    """The change of one ATen op that runs below a node.

    Args:
        place: how many ops ran before it, but for those that copy. op: its name.
        converted: index among the op's tensors -> its conversions.
        run: what runs in the op's place; None: the op itself.
        writes: the op writes into a tensor that is converted.
        reason, detail: why the op is refused as it is.
    """

    place: int
    op: str
    converted: tuple[tuple[int, tuple[Conversion, ...]], ...]
    run: RunOverRanks | None
    writes: bool
    reason: Reason
    detail: str

    @property
    def conversions(self) -> list[Conversion]:
        """Conversions of all its operands."""
        return [conversion for _, each in self.converted for conversion in each]

    @property
    def runs(self) -> list[Any]:
        """The parts of the change: conversions, and what runs in the op's place."""
        return [*self.conversions, *([self.run] if self.run else [])]

    @property
    def local(self) -> bool:
        """True if the change only leaves out rows without a token, which may be done twice."""
        return all(getattr(each, "local", False) for each in self.runs)


@dataclass(frozen=True)
class Lowering:
    """A node that is taken apart into ATen ops, some of which are changed.

    Args:
        node: of the graph or of a nested region in it.
        steps: the ops to change. autocasts: arguments of the autocast regions that the node stands in.
    """

    node: fx.Node
    steps: tuple[Step, ...]
    autocasts: tuple[Sequence[Any], ...] = ()

    @property
    def reads(self) -> tuple[PlanInput, ...]:
        """The plan's tensors that its ops read."""
        own = (key for step in self.steps for each in step.runs for key in getattr(each, "reads", ()))
        return tuple(dict.fromkeys((*READ, *own)))

    @property
    def why(self) -> str:
        """The reason that a report gives."""
        made = [f"{step.op} {getattr(step.run, 'why', _OVER_ALL)}" for step in self.steps if step.run]
        made += {why: None for step in self.steps for each in step.conversions if (why := getattr(each, "why", ""))}
        return ", ".join(made) or "sums inside of it are needed whole"


_OVER_ALL = "over the tokens of all ranks"


@dataclass(frozen=True)
class Insert:
    """`node` reads what `emit` makes of `operand`, in the operand's place; other nodes that read it are left alone.

        y = x.sum()     ->     masked = where(has_token, x, 0); y = masked.sum()

    Args:
        node: the reader; any node of the graph or of a nested region in it.
        operand: one of its operands. What `emit` gives has the operand's shape and dtype.
        emit: called with proxies, of the operand and of `inputs`: it makes the new nodes by torch's functions.
        why: what it is for, as the report says it.
        inputs: the plan's tensors that it needs.
    """

    node: fx.Node
    operand: fx.Node
    emit: Callable[..., Any]
    why: str
    inputs: tuple[PlanInput, ...] = ()


@dataclass(frozen=True)
class PositionGenerator:
    """A node that makes positions 0, 1, 2, … of the shard, whose values are used per token.

    Args:
        node: `arange`: its (T,) result stands for the rows' global indices. `table`: it takes the first T rows, along
            `dim`, of its first operand; these stand for the rows at the global indices.
        kind: which of both.
        dim: for a table, the dim of the operand that positions run over.
    """

    node: fx.Node
    kind: Literal["arange", "table"] = "arange"
    dim: int = 0

    @property
    def table(self) -> fx.Node | None:
        return None if self.kind == "arange" else self.node.all_input_nodes[0]

    def at(self, index: Any, table: Any) -> Any:
        """The positions, or the rows of `table`, at places of the row: `index`, (T,) int64."""
        dtype = self.node.meta["example_value"].dtype
        return index.to(dtype) if self.kind == "arange" else table.index_select(self.dim, index)


@dataclass(frozen=True)
class RowReader:
    """A node that broadcasts what is computed of positions against rows of the batch.

    Args:
        node: the reader. source: what it reads, the same for all rows.
        dim: of the source's where the rows of the batch belong: one of size 1, or so many dims in front of its own.
    """

    node: fx.Node
    source: fx.Node
    dim: int


@dataclass(frozen=True)
class RowPositions:
    """Positions that all rows of the batch share on one process, computed for each row by itself.

        index = arange(T)                 for each row: its tokens' places
        cos = (index * inv).cos()         shared: for each row by itself
        q * cos                           readers

    Args:
        generators: what makes them. shared: what is computed of them, in the graph's order. readers: of these.
        lowered: those that count with the tokens of a row.
    """

    generators: tuple[PositionGenerator, ...] = ()
    shared: tuple[fx.Node, ...] = ()
    readers: tuple[RowReader, ...] = ()
    lowered: tuple[Lowering, ...] = ()


@dataclass(frozen=True)
class NeighbourRead:
    """The read that takes the place of a node that shifts, rolls or convolves tokens.

    Args:
        node: the node. source: whose rows are read; its shape is the node's, but for the channels of a convolution.
        token_dim, batch_dim: of the source; None: the batch has one row, or one for all.
        read: what each token reads; None: the source's rows as they are, of which some are left out on one process.
        extras: the rows that all ranks have, in turn: a node whose token dim begins with
            so many of them, or a number; and what makes them the same on all ranks.
        conv: the convolution that runs on what was read; None: that is the result.
        group: of the ranks. why: what the report says.
        unread: nodes with a gradient, which is zero: they were joined to the rows, and all of theirs left out.
    """

    node: fx.Node
    source: fx.Node
    token_dim: int
    batch_dim: int | None
    read: Neighbours | None
    extras: tuple[tuple[fx.Node | float, int, tuple[OfSums, ...]], ...]
    conv: fx.Node | None
    group: str
    why: str
    unread: tuple[fx.Node, ...] = ()

    @property
    def inputs(self) -> tuple[PlanInput, ...]:
        """The plan's tensors that it needs."""
        return () if self.read is None else PlanInput.of_neighbours(self.read)


@dataclass(frozen=True)
class Locality:
    """Findings of the locality check.

    Args:
        refusals: every op that is not the same on a shard.
        positions: nodes to be made global.
        row_positions: what makes positions for each row of the batch by itself, in the place of `positions`; None:
            there are none, or all rows share them.
        looked_up: nodes that take the first T rows of a table, which are looked up: all of it stays there.
        inserts: what is put between nodes and their operands.
        lowered: nodes that are taken apart.
        reads: nodes that shift, roll or convolve tokens, and what replaces them.
        fewer: nodes whose tensors have so many tokens fewer than the row, and keep a row for each.
        states: what is known of each node; of those of a region that is entered several times, what holds every time.
        fill_sums: sums over tokens that rows without a token would change, whatever is inserted.
        padding_sums: what takes in values of tokens of no document after attention: right only when no batch has any.
        outputs: the dim of each output that counts tokens, of a tensor with one row for each token of each row of the
            batch; None of others.
        axes: of each other output that has tokens, in which dims; None of all others.
        parts: whether each output is this rank's part of a sum that one process returns.
    """

    refusals: tuple[Refusal, ...] = ()
    positions: tuple[PositionGenerator, ...] = ()
    row_positions: RowPositions | None = None
    looked_up: tuple[fx.Node, ...] = ()
    inserts: tuple[Insert, ...] = ()
    lowered: tuple[Lowering, ...] = ()
    reads: tuple[NeighbourRead, ...] = ()
    fewer: Mapping[fx.Node, int] = field(default_factory=dict[fx.Node, int])
    states: Mapping[fx.Node, Any] = field(default_factory=dict[fx.Node, Any])
    fill_sums: tuple[fx.Node, ...] = ()
    padding_sums: tuple[fx.Node, ...] = ()
    outputs: tuple[int | None, ...] = ()
    axes: tuple[TokenAxes | None, ...] = ()
    parts: tuple[bool, ...] = ()

    def changed(self) -> Iterator[fx.Node]:
        """Nodes that the rewrite replaces or gives other operands."""
        yield from (found.node for found in (*self.inserts, *self.lowered, *self.reads, *self.positions))
        if self.row_positions is not None:
            yield from (found.node for found in (*self.row_positions.generators, *self.row_positions.readers))
            yield from self.row_positions.shared
