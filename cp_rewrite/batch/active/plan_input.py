"""What a rewritten graph reads of a batch's plan."""

from __future__ import annotations

from dataclasses import dataclass

from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.routes import grid
from cp_rewrite.planning.routes.by_exchange import ROUTES, split_exchange
from cp_rewrite.planning.routes.route import KERNEL_TABLES, PlanTensor
from cp_rewrite.planning.token_reads.neighbours import NEIGHBOURS, OUT_ROWS, Neighbours
from cp_rewrite.planning.token_reads.scans import SCAN, Scan
from cp_rewrite.planning.token_reads.states import STATES, States


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
        """What a running operation reads."""
        return tuple(PlanInput(x, read=scan) for x in SCAN)

    @staticmethod
    def of_states(states: States) -> tuple[PlanInput, ...]:
        """What a recurrence over pieces reads."""
        return tuple(PlanInput(x, read=states) for x in STATES)

    @staticmethod
    def of_neighbours(read: Neighbours) -> tuple[PlanInput, ...]:
        """What `neighbour_rows` reads; where a token reads several rows, `out_rows` too."""
        return tuple(PlanInput(x, read=read) for x in NEIGHBOURS + (OUT_ROWS,) * (read.span > 1))

    @staticmethod
    def of_site(mask: PackedMask, exchange: str) -> tuple[PlanInput, ...]:
        """What `packed_attention` reads: its tables, then its route."""
        scattered, kind = split_exchange(exchange)
        route = ROUTES[kind]
        # A ring has tables for each of its steps, a grid of ranks those of its outer places.
        whose = exchange if scattered or route.in_steps else None
        return (
            *(PlanInput(tensor, mask, whose) for tensor in KERNEL_TABLES),
            *(PlanInput(tensor, mask, exchange) for tensor in route.tensors + grid.ORDER * scattered),
        )


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
