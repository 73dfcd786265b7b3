"""Inputs that graphs read from a batch's plan: its tensors by name, and what is read of other tokens.

    PlanTensor, …                tensors of a plan
    Neighbours, Scan, States     what is read of other tokens, and the tensors that it takes
    PlanInput                    one input of a graph

Specs alone: who makes the tensors is `routes/`, `reads.py` and `states.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from cp_rewrite.masks import PackedMask

from .row_map import RowMap


@dataclass(frozen=True)
class PlanTensor:
    """A tensor of a batch's plan. Args: on_host: ops read it on the host; all others live on the device. static: its
    size follows from the number of ranks alone."""

    name: str
    on_host: bool = False
    static: bool = False


KERNEL_TABLES = (
    PlanTensor("cu_seqlens_q"),
    PlanTensor("cu_seqlens_k"),
    PlanTensor("pieces", on_host=True),
    PlanTensor("launches", on_host=True),
)
"""Tensors that `Schedule.attention` makes, and every attention kernel reads."""


EXTRAS = "extras"
"""Source, in `Neighbours.entries`, of pieces that are no tokens: rows that all ranks have."""


@dataclass(frozen=True)
class Neighbours:
    """The rows that each token's local row reads.

    Args:
        entries: all, of tokens and of `EXTRAS`.
        first, span: as drawn in `reads.py`; `first` may not be negative.
        extras: how many rows all ranks have, for each row of the batch.
        keeps_fill: local rows without a token read themselves; else what the token reads of which they are copies.
        apart: tokens of documents may not read tokens of none, whose values attention made.
        across: rows that were joined to one are read over their ends.
        resets: each document has entries of its own, as a row.
    """

    entries: RowMap
    first: int = 0
    span: int = 1
    extras: int = 0
    keeps_fill: bool = False
    apart: bool = False
    across: bool = False
    resets: bool = False


SENT_ROWS = (
    PlanTensor("send_rows"),
    PlanTensor("splits", on_host=True, static=True),
    PlanTensor("sum_ptr"),
    PlanTensor("sum_rows"),
    PlanTensor("return_ptr"),
    PlanTensor("return_rows"),
)
"""Which rows go to the ranks that read them, and how their gradients are summed there and here, in order."""
NEIGHBOURS = (PlanTensor("rows"), *SENT_ROWS)
"""Tensors that `neighbour_rows` reads of the plan, in order."""
OUT_ROWS = PlanTensor("out_rows")


@dataclass(frozen=True)
class Scan:
    """The line of tokens that a running operation runs over.

    Args:
        joined: all rows of the batch, one behind another, as one line.
        apart: tokens of documents may not take in tokens of none, whose values attention made.
    """

    joined: bool = False
    apart: bool = False


SCAN = (
    PlanTensor("scan_order"),
    PlanTensor("scan_place"),
    PlanTensor("scan_piece"),
    PlanTensor("scan_ends"),
    PlanTensor("scan_before"),
)
"""Tensors that a running operation reads of the plan, in order; the first three have an entry for each local row."""


@dataclass(frozen=True)
class States:
    """The sequences that a state passes through.

    Args:
        resets: the tokens of one document; else those of a row of the batch.
        apart: without `resets`, documents may not take in tokens of none, whose values attention made.
    """

    resets: bool
    apart: bool = False


STATES = (
    PlanTensor("chunk_rows"),
    PlanTensor("chunk_levels", on_host=True),
    PlanTensor("cut_pieces"),
    PlanTensor("summed_chunks"),
    PlanTensor("summed_levels", on_host=True),
    *(
        PlanTensor(f"{name}{way}", on_host=name in ("fold_levels", "splits"), static=name == "splits")
        for way in ("", "_back")
        for name in ("send_summaries", "splits", "fold_order", "fold_levels", "fold_place")
    ),
    PlanTensor("runs", on_host=True),
    PlanTensor("run_offsets"),
    PlanTensor("run_chunks"),
    PlanTensor("run_states"),
)
"""Tensors that an op over states reads of the plan, in order. The reference reads chunks, kernels read runs."""


@dataclass(frozen=True)
class PlanInput:
    """One extra input of a rewritten graph: a tensor of the schedule of `mask`, as `exchange` needs it; or of the route
    of `read`, what is read of other tokens."""

    tensor: PlanTensor
    mask: PackedMask | None = None
    exchange: str | None = None
    read: Neighbours | Scan | States | None = None

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def is_per_token(self) -> bool:
        """True if it has an entry for each of this rank's tokens, of one row of the batch or of all."""
        if isinstance(self.read, Scan):
            return self.tensor in SCAN[:3]
        narrow = isinstance(self.read, Neighbours) and self.read.span == 1
        return (
            self in (ROW_INDEX, HAS_TOKEN, TOKEN_INDEX) or self.tensor == OUT_ROWS or (narrow and self.name == "rows")
        )

    @staticmethod
    def of_scan(scan: Scan) -> tuple[PlanInput, ...]:
        """Inputs of a running operation."""
        return tuple(PlanInput(x, read=scan) for x in SCAN)

    @staticmethod
    def of_states(states: States) -> tuple[PlanInput, ...]:
        """Inputs of a recurrence over pieces."""
        return tuple(PlanInput(x, read=states) for x in STATES)

    @staticmethod
    def of_neighbours(read: Neighbours) -> tuple[PlanInput, ...]:
        """Inputs of `neighbour_rows`; where a token reads several rows, `out_rows` too."""
        return tuple(PlanInput(x, read=read) for x in NEIGHBOURS + (OUT_ROWS,) * (read.span > 1))


ROW_INDEX = PlanInput(PlanTensor("row_index"))
"""(T_l,) int64: index in the global row of each local token. It belongs to no mask or exchange."""
HAS_TOKEN = PlanInput(PlanTensor("has_token"))
"""(B, T_l) bool: whether a local row holds a token or fills the rank up. It belongs to no mask or exchange."""
TOKEN_INDEX = PlanInput(PlanTensor("token_index"))
"""(B, T_l) int64: as `row_index`, for each row of the batch its own."""
COPIED_ROWS = PlanInput(PlanTensor("copied_rows"))
"""(B, T_l) int64: the local row that each is a copy of, T_l where this rank has not that row. No graph reads it."""
TOKEN_ROWS = PlanInput(PlanTensor("token_rows"))
"""(T, B) int64: the local row of each token of the global rows, -1 of another rank's. It belongs to no mask."""
IN_DOCUMENT = PlanInput(PlanTensor("in_document"))
"""(T, B) bool: whether each token of the global rows belongs to a document. It belongs to no mask or exchange."""
ROW_TOKENS = PlanInput(PlanTensor("row_tokens", static=True))
"""(1,) int64: the tokens of a row, of all ranks together. It belongs to no mask or exchange."""
