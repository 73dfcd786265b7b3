"""Cost of layers that pass a state through tokens, under a token order, forward and backward.

work       of the rank with most chunks of 64 tokens, full or not: the same for each
passes     a delta rule needs what enters a piece before it can begin. What a piece does to it takes passes of their
           own over the piece: three where it is cut on both sides, one where only its start or its end is a cut
exchange   the summaries of all earlier pieces of a sequence, in the backward of all later ones
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from cp_rewrite.arguments import flag, whole_number
from cp_rewrite.documents import Documents
from cp_rewrite.planning.intervals import CHUNK, Int, chunk_counts, overlaps
from cp_rewrite.planning.layouts.token_order import TokenOrder

from .constants import SCAN_COPIES, STATE_COPIES, STATE_PASS
from .devices import Device
from .load import transfer_seconds
from .tiles import Float

StateKind = Literal["gated_delta_rule", "kimi_delta", "ssd", "selective_scan"]


@dataclass(frozen=True)
class StateLayers:
    """Layers of a hybrid that pass a state through tokens, for `balanced` to weigh beside attention.

    Args:
        kind: `gated_delta_rule`, `kimi_delta`, `ssd` or `selective_scan`.
        heads, keys, values: a state has heads x keys x values numbers: of SSD the state's size is `keys`, a head's dim
            `values`; of a selective scan heads are channels, with 1 value.
        per_attention: such layers for each layer of attention, 3 for Qwen3-Next.
        resets: states begin anew at documents. False: they go through whole rows.
    Raises:
        TypeError, ValueError: an unknown kind, or a number that is no whole one or below 1.
    """

    kind: StateKind
    heads: int
    keys: int
    values: int
    per_attention: int = 3
    resets: bool = True

    def __post_init__(self) -> None:
        if self.kind not in get_args(StateKind):
            raise ValueError(f"kind must be one of {', '.join(get_args(StateKind))}; got {self.kind!r}")
        for name in ("heads", "keys", "values", "per_attention"):
            whole_number(name, getattr(self, name))
        flag("resets", self.resets)

    @property
    def summary_bytes(self) -> int:
        """Bytes of what one piece does to the state, in one direction."""
        moves = {"ssd": 1, "selective_scan": self.keys * self.values}.get(self.kind, self.keys * self.keys)
        return 4 * self.heads * (moves + self.keys * self.values)

    def seconds(self, documents: Documents, order: TokenOrder, device: Device, ranks_per_node: int) -> float:
        """Seconds of `per_attention` layers, forward and backward."""
        pieces = StatePieces.of(documents, order, self.resets)
        copies = SCAN_COPIES if self.kind == "selective_scan" else STATE_COPIES
        token = copies * 2 * self.heads * (self.keys + self.values) / device.memory
        work = np.bincount(pieces.owner, CHUNK * chunk_counts(pieces.length), order.world_size)
        if self.kind in ("gated_delta_rule", "kimi_delta"):
            work = work + STATE_PASS * pieces.passed_more(order.world_size)
        ways = (way.received(order.world_size, ranks_per_node) for way in (pieces, pieces.back()))
        travels = [way for way in ways if way[0].any() or way[1].any()]
        exchange = sum(transfer_seconds(*way, self.summary_bytes, device) for way in travels)
        return self.per_attention * (token * float(work.max()) + exchange)


@dataclass(frozen=True)
class StatePieces:
    """Pieces of all ranks, by sequence and by their place in it. Each is (n,) int64."""

    sequence: Int
    owner: Int
    length: Int

    @staticmethod
    def of(documents: Documents, order: TokenOrder, resets: bool) -> StatePieces:
        """Pieces of the sequences of a row, as `planning/states.py` has them."""
        real = documents.lengths > 0
        whole = np.zeros(1, dtype=np.int64), np.full(1, documents.total, dtype=np.int64)
        first, end = (documents.starts[real], documents.ends[real]) if resets else whole
        starts, stops, owners, _ = order.segments
        segment, sequence = overlaps(starts, stops, first, end)
        length = np.minimum(stops[segment], end[sequence]) - np.maximum(starts[segment], first[sequence])
        return StatePieces(sequence, owners[segment], length)

    def back(self) -> StatePieces:
        """The same pieces, the last one first."""
        return StatePieces(self.sequence[::-1], self.owner[::-1], self.length[::-1])

    def passed_more(self, ranks: int) -> Float:
        """(P,) tokens of all passes that tell what pieces do. A first piece that is most of its rank is passed through
        once where no state enters the rank, and so is a last one where none leaves."""
        late = np.diff(self.sequence, prepend=-1) == 0
        early = np.append(late[1:], False)
        held, entered, left = (np.bincount(self.owner, self.length * x, ranks)[self.owner] for x in (1, late, early))
        most = 2 * self.length > held
        first, last = early & ~late & ~(most & (entered == 0)), late & ~early & ~(most & (left == 0))
        passes = 3 * (late & early) + first + last
        return np.bincount(self.owner, self.length * passes, ranks).astype(np.float64)

    def received(self, ranks: int, ranks_per_node: int) -> tuple[Int, Int]:
        """(P,) summaries of earlier pieces that come to each rank: (from its own node, from others)."""
        count, places = len(self.owner), np.arange(len(self.owner))
        asked, last = np.unique(np.stack([self.owner, self.sequence])[:, ::-1], axis=1, return_index=True)
        (rank, sequence), last = asked, count - 1 - last  # of the rank's pieces of a sequence

        def before(size: int) -> Int:
            """Pieces, of the sequence and of the same group of `size` ranks, before the rank's last one."""
            keys = np.sort((self.owner // size * count + self.sequence) * count + places)
            key = (rank // size * count + sequence) * count
            return np.searchsorted(keys, key + last) - np.searchsorted(keys, key)

        own, node, every = before(1), before(ranks_per_node), before(ranks)
        inside, across = (np.bincount(rank, x, ranks).astype(np.int64) for x in (node - own, every - node))
        return inside, across
