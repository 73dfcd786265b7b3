"""The meaning of a packed mask, as a value: packing x chunks, spans or trees x causality x window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .arguments import flag, whole_number
from .documents import Documents, Nodes, SpanRuns

Window = tuple[int | None, int | None]
DROPPED_AT = -65504.0
"""An additive mask drops the keys to which it adds this, the lowest fp16 number, or less.

A key's softmax weight is then exactly zero in every dtype, unless its logit is as much above another one. The additive
masks in use are -inf, finfo(dtype).min, -1e9 and their sums.
"""


@dataclass(frozen=True)
class PackedMask:
    """Which keys a query may see in a row of packed documents.

    Query `q` sees key `k` when both are tokens of one document (`packed`), and of one chunk of it, `q - k <= left`,
    `k - q <= right`, and, when `causal`, `k <= q`. Offsets are in tokens of the row.

    Args:
        causal: no key after the query. Sets the right side of the window to 0.
        window: `(left, right)` in tokens, as FlashAttention's `window_size`; `None` or -1 on a side means no limit.
            `None` means `(None, None)`. A model's "sliding window of W" is `(W - 1, 0)`.
        packed: False means that the mask ignores documents: the row is one document.
        chunk: documents are cut at multiples of so many tokens. None: they are whole.
        chunk_of: where chunks are counted from: each `document`'s start, or the `row`'s.
        spans: tokens of one span of a document (`Sharding.spans`) see each other, whatever causality and window say.
        tree: of its document, a tree (`packing=Tree(...)`), a query sees its own node and that one's ancestors only.
        levels: in a tree, only so many ancestors. None: all.
    Raises:
        TypeError, ValueError: a flag that is no bool, a window that is no pair, a side that is no number >= -1, a chunk
            that is no number >= 1, levels that are none >= 0; spans or trees of a mask that is not causal, or has
            chunks; trees with a window.
    """

    causal: bool = True
    window: Window | None = None
    packed: bool = True
    chunk: int | None = None
    chunk_of: Literal["document", "row"] = "document"
    spans: bool = False
    tree: bool = False
    levels: int | None = None

    def __post_init__(self) -> None:
        for name in ("causal", "packed", "spans", "tree"):
            flag(name, getattr(self, name))
        window: Any = (None, None) if self.window is None else self.window
        if not isinstance(window, tuple | list) or len(window) != 2:
            raise ValueError(f"window must be a pair (left, right) of token counts or None, got {window!r}")
        name = "a side of window (-1 or None: no limit)"
        left, right = (None if side in (None, -1) else whole_number(name, side, -1) for side in window)
        right = 0 if self.causal else right
        if self.chunk_of not in ("document", "row"):
            raise ValueError(f"chunk_of must be 'document' or 'row', got {self.chunk_of!r}")
        # One spelling for each mask, so that equal masks compare equal: (None, 0) *is* causal.
        if self.chunk is not None:
            farthest = whole_number("chunk", self.chunk) - 1
            left = None if left is not None and left >= farthest else left
            right = None if right and right >= farthest else right
        chunk_of = "document" if self.chunk is None else self.chunk_of if self.packed else "row"
        object.__setattr__(self, "chunk_of", chunk_of)
        object.__setattr__(self, "causal", right == 0)
        object.__setattr__(self, "window", None if (left is None and right in (None, 0)) else (left, right))
        if (self.spans or self.tree) and (right != 0 or self.chunk is not None):
            raise ValueError("masks with spans or trees are causal, and have no chunks")
        if self.levels is not None:
            object.__setattr__(self, "levels", whole_number("levels", self.levels, 0) if self.tree else None)
        if self.tree and (self.spans or left is not None or not self.packed):
            raise ValueError("masks of trees have neither a window nor spans, and are packed")

    @property
    def left(self) -> int | None:
        """Keys before the query that it sees, itself not counted; None: all."""
        return None if self.window is None else self.window[0]

    @property
    def right(self) -> int | None:
        """Keys after the query that it sees; None: all."""
        return 0 if self.causal else (None if self.window is None else self.window[1])

    @property
    def is_plain(self) -> bool:
        """True if it has neither chunks nor spans nor trees."""
        return self.chunk is None and not self.spans and not self.tree

    @property
    def looks_ahead(self) -> bool:
        """True if a query may see keys after it."""
        return self.right != 0 or self.spans

    @property
    def hangs_on_others(self) -> bool:
        """True if tokens beside query and key decide what a query sees: a span goes on over them, a node is theirs."""
        return self.spans or self.tree

    def documents(self, documents: Documents) -> Documents:
        """Documents that attention is over: the row's, cut into chunks where the mask has any; or the row as one."""
        whole = documents if self.packed else Documents.from_lengths([documents.total])
        return whole if self.chunk is None else whole.cut(self.chunk, self.chunk_of == "row")

    def spans_of(self, documents: Documents) -> SpanRuns:
        """The spans of a row. Raises a ValueError where the batch names none, or ones that no such mask has."""
        if documents.spans is None:
            raise ValueError(f"the mask '{self}' needs spans: name them in Sharding(spans=...)")
        spans = documents.spans.inside(self.documents(documents))
        lengths = spans.ends - spans.starts
        if self.left is not None and lengths.max(initial=0) > self.left + 1:
            i = int(lengths.argmax())
            raise ValueError(
                f"the span at token {spans.starts[i]} has {lengths[i]} tokens, which a window of {self.left + 1} would "
                "cut: spans may be as long as the window"
            )
        return spans

    def nodes_of(self, documents: Documents) -> Nodes:
        """The nodes of a row's trees. Raises a ValueError where it has none."""
        if documents.nodes is None:
            raise ValueError(f"the mask '{self}' needs trees: pack rows by packing=Tree(...)")
        return documents.nodes if self.levels is None else replace(documents.nodes, levels=self.levels)

    def materialize(self, documents: Documents | Sequence[int]) -> NDArray[np.bool_]:
        """(T, T) bool of one row: [q, k] is True where query q sees key k. For tests: T² values."""
        docs = documents if isinstance(documents, Documents) else Documents.from_lengths(documents)
        index = np.arange(docs.total)
        return self.sees(docs, index[:, None], index)

    def sees(self, documents: Documents, q: NDArray[np.int64], k: NDArray[np.int64]) -> NDArray[np.bool_]:
        """True if the queries at places `q` of the row see the keys at `k`, to which they broadcast; -1 is no token."""
        keep = self.reaches(q - k)
        if self.spans:
            spans = self.spans_of(documents)
            in_query, in_key = (_span_of(spans, each) for each in (q, k))
            keep |= (in_query == in_key) & (in_query >= 0)
        if self.tree:
            nodes = self.nodes_of(documents)
            node = nodes.of_tokens(documents.total)
            keep &= nodes.above[node[q], node[k]]
        ids = self.documents(documents).document_ids()
        return keep & (ids[q] == ids[k]) & (ids[q] >= 0) & (q >= 0) & (k >= 0)

    def reaches(self, delta: NDArray[np.int64]) -> NDArray[np.bool_]:
        """True if the window lets a query see a key that stands `delta` tokens before it, whatever their documents."""
        keep = np.ones(delta.shape, dtype=np.bool_)
        if self.left is not None:
            keep &= delta <= self.left
        if self.right is not None:
            keep &= delta >= -self.right
        return keep

    def __str__(self) -> str:
        parts = ["same document"] if self.packed else ["whole row"]
        if self.chunk is not None:
            parts.append(f"chunks of {self.chunk}{' of the row' if self.chunk_of == 'row' and self.packed else ''}")
        if self.tree:
            parts.append("own path of the tree" + ("" if self.levels is None else f", {self.levels} levels up"))
        if self.causal:
            parts.append("causal, or of one span" if self.spans and self.window is None else "causal")
        if self.window is not None:
            left, right = ("∞" if side is None else str(side) for side in self.window)
            parts.append(f"window ({left}, {right}){', or of one span' if self.spans else ''}")
        elif not self.causal:
            parts.append("full")
        return " & ".join(parts)


def _span_of(spans: SpanRuns, index: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of each token's span; -1: it is in none."""
    span = np.searchsorted(spans.starts, index, side="right") - 1
    return np.where(index < np.append(spans.ends, -1)[span], span, -1)


class MaskMismatch(RuntimeError):
    """A mask is not what the rewrite takes it for. Raised on every rank of the group."""
