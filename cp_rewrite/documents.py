"""The documents of one packed row, read on the host from what the batch carries, with the spans and trees inside of
them.

    Nodes        trees of runs of tokens that share what stands before them: one prompt, many completions
    SpanRuns     runs of tokens that see each other in both directions
    Documents    the documents, by lengths, offsets, positions, ids, a padding mask, or their first or last tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .arguments import whole_number, whole_numbers

Int = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes of a row's trees: node i holds tokens [starts[i], ends[i]), which continue those of node parents[i].

    A token's *path* is its node and that one's ancestors. It sees the tokens of its path up to itself.

        tokens    0 1 2 3 4 5 6 7        node 0: [0, 3)                the prompt
        node      0 0 0 1 1 2 2 2              1: [3, 5), parent 0     a completion
                                               2: [5, 8), parent 0     token 6 sees 0 1 2 5 6

    Args:
        starts, ends: (N,) int64, disjoint and ascending; no node is empty.
        parents: (N,) int64, each before its node; -1 of a root.
        levels: a path holds the node and so many above it. None: all.
    Raises:
        ValueError: empty or overlapping nodes, or a parent that does not stand before its node.
    """

    starts: Int
    ends: Int
    parents: Int
    levels: int | None = None

    def __post_init__(self) -> None:
        if not self.starts.shape == self.ends.shape == self.parents.shape:
            raise ValueError("starts, ends and parents of nodes must be equal 1-d shapes")
        if (self.ends <= self.starts).any() or (self.starts[1:] < self.ends[:-1]).any():
            raise ValueError("nodes must hold tokens, and be disjoint and in order")
        late = np.flatnonzero((self.parents >= np.arange(len(self.parents))) | (self.parents < -1))
        if late.size:
            raise ValueError(f"node {late[0]} of a tree must stand behind its parent, node {self.parents[late[0]]}")

    @cached_property
    def ancestors(self) -> tuple[Int, Int]:
        """All pairs of a node and one of the ancestors on its path, both (M,) int64: by node, the root first."""
        nodes = [np.zeros(0, dtype=np.int64)]
        above = [np.zeros(0, dtype=np.int64)]
        node, at = np.arange(len(self.parents)), self.parents
        while (at >= 0).any() and (self.levels is None or len(above) <= self.levels):
            node, at = node[at >= 0], at[at >= 0]
            nodes.append(node)
            above.append(at)
            at = self.parents[at]
        node, ancestor = np.concatenate(nodes), np.concatenate(above)
        order = np.lexsort((ancestor, node))
        return node[order], ancestor[order]

    @cached_property
    def tokens_before(self) -> Int:
        """(N,) int64 tokens of each node's ancestors."""
        node, ancestor = self.ancestors
        return np.bincount(node, (self.ends - self.starts)[ancestor], len(self.parents)).astype(np.int64)

    def clipped(self, start: int, stop: int) -> Nodes:
        """Nodes of tokens [start, stop), counted from there; what is above them must be there too."""
        real = (self.ends > start) & (self.starts < stop)
        number = np.append(np.cumsum(real) - 1, -1)
        return Nodes(
            np.maximum(self.starts[real], start) - start,
            np.minimum(self.ends[real], stop) - start,
            number[self.parents[real]],
            self.levels,
        )

    def of_tokens(self, total: int) -> Int:
        """(total,) int64: the node of each token, -1 for padding."""
        ids = np.full(total, -1, dtype=np.int64)
        for i, (start, end) in enumerate(zip(self.starts.tolist(), self.ends.tolist(), strict=True)):
            ids[start:end] = i
        return ids

    @property
    def above(self) -> NDArray[np.bool_]:
        """(N + 1, N + 1) bool: [i, j] is True where node j is on the path of node i; the last is padding."""
        count = len(self.parents)
        above = np.zeros((count + 1, count + 1), dtype=np.bool_)
        above[np.arange(count), np.arange(count)] = True
        above[self.ancestors] = True
        return above

    @classmethod
    def from_ranges(cls, first: ArrayLike, behind: ArrayLike) -> Nodes:
        """`first`, `behind`, (T,) integers: of each token's node, the range [first, behind) of numbers that it and its
        descendants have, `tin` and `tout` of a depth-first walk; both negative for padding.

        tokens    a a a b b c c       b and c continue a
        first     0 0 0 1 1 2 2
        behind    3 3 3 2 2 3 3       of tokens' own indices: first 0 1 2 3 4 5 6, behind 7 7 7 5 5 7 7
        """
        tin, tout = whole_numbers("first numbers of nodes", first), whole_numbers("last numbers of nodes", behind)
        if tin.shape != tout.shape:
            raise ValueError(f"tin has {tin.size} tokens, tout {tout.size}")
        real = tin >= 0
        bad = np.flatnonzero((real & (tout <= tin)) | (real != (tout >= 0)))
        if bad.size:
            raise ValueError(
                f"token {bad[0]} has the range [{tin[bad[0]]}, {tout[bad[0]]}): tout must be above tin, and both are "
                "negative in padding"
            )
        # A token continues the node before it where its range is the same, or what that one's own token leaves over.
        same = (tout[1:] == tout[:-1]) & ((tin[1:] == tin[:-1]) | (tin[1:] == tin[:-1] + 1)) & real[1:] & real[:-1]
        # Where numbers count nodes, the next number with the same end is a last child, not the same node; where they
        # count tokens, no two tokens have one number. Both see alike: a chain of nodes is one node.
        starts = np.flatnonzero(real & np.append(True, ~same))
        ends = np.flatnonzero(real & np.append(~same, True)) + 1
        return cls._nested(starts, ends, tin[starts], tout[starts], tin[ends - 1])

    @classmethod
    def _nested(cls, starts: Int, ends: Int, tin: Int, tout: Int, last: Int) -> Nodes:
        """Nodes whose ranges [tin, tout) lie inside one another. `last`: the number of each node's last token."""
        parents = np.full(len(starts), -1, dtype=np.int64)
        stack: list[int] = []
        for i in range(len(starts)):
            while stack and tout[stack[-1]] <= tin[i]:
                stack.pop()
            if i and tin[i] <= last[i - 1]:
                raise ValueError(f"tokens {ends[i - 1] - 1} and {starts[i]}: tin must grow from node to node")
            if stack:
                if tout[i] > tout[stack[-1]]:
                    raise ValueError(
                        f"the range [{tin[i]}, {tout[i]}) of token {starts[i]} overlaps "
                        f"[{tin[stack[-1]]}, {tout[stack[-1]]}) of token {starts[stack[-1]]}: ranges must be nested"
                    )
                parents[i] = stack[-1]
            stack.append(i)
        return cls(starts, ends, parents)

    @classmethod
    def from_parents(cls, segments: ArrayLike, parents: ArrayLike) -> Nodes:
        """`segments` (T,): of each token the number of its node, negative for padding. `parents` (M,): of each such
        number that of the node's parent, a root's its own; those that no token has may be anything.

        tokens    a a a b b c c       b and c continue a
        segments  0 0 0 1 1 2 2       parents 0 0 0
        """
        segment, above = whole_numbers("numbers of nodes", segments), whole_numbers("parents of nodes", parents)
        change = np.flatnonzero(np.diff(segment, prepend=-1, append=-1))
        starts, ends = change[:-1], change[1:]
        starts, ends = starts[segment[starts] >= 0], ends[segment[starts] >= 0]
        numbers = segment[starts]
        if numbers.size and numbers.max() >= above.size:
            raise ValueError(f"a token has node {numbers.max()}, parents are given of {above.size} nodes")
        order = np.argsort(numbers, kind="stable")
        twice = numbers[order][1:][np.diff(numbers[order]) == 0]
        if twice.size:
            raise ValueError(f"node {twice[0]} stands in two runs of tokens: they must be contiguous")
        place = np.full(above.size + 1, -1, dtype=np.int64)
        place[numbers] = np.arange(len(numbers))
        told = above[numbers]
        found = place[np.clip(told, -1, above.size)]
        if (lost := np.flatnonzero(found < 0)).size:
            of, is_ = numbers[lost[0]], told[lost[0]]
            raise ValueError(f"the parent of node {of} is {is_}, which no token has: a root is its own parent")
        return cls(starts, ends, np.where(told == numbers, -1, found))

    @classmethod
    def from_completions(cls, prompts: ArrayLike, completions: ArrayLike) -> Nodes:
        """`prompts` (T,): one id per prompt, on its tokens and on those of all its completions; negative for padding.
        `completions` (T,): 0 on the prompt, and another number for each completion of a prompt."""
        prompt, completion = whole_numbers("prompt ids", prompts), whole_numbers("completion ids", completions)
        if prompt.shape != completion.shape:
            raise ValueError(f"prompt ids have {prompt.size} tokens, completion ids {completion.size}")
        real = prompt >= 0
        if (bad := np.flatnonzero(real & (completion < 0))).size:
            raise ValueError(f"token {bad[0]} has completion {completion[bad[0]]}: they count from 1, a prompt has 0")
        change = np.ones(prompt.size, dtype=np.bool_)
        change[1:] = (np.diff(prompt) != 0) | (np.diff(completion) != 0)
        starts = np.flatnonzero(change & real)
        ends = np.append(np.flatnonzero(change[1:]) + 1, prompt.size)
        ends = ends[real[ends - 1]] if prompt.size else ends[:0]
        parents = np.full(len(starts), -1, dtype=np.int64)
        root: dict[int, int] = {}
        seen: set[tuple[int, int]] = set()
        for i, start in enumerate(starts.tolist()):
            key = int(prompt[start]), int(completion[start])
            if key in seen:
                raise ValueError(
                    f"completion {key[1]} of prompt {key[0]} stands in two runs of tokens: they must be contiguous"
                )
            seen.add(key)
            if key[1] == 0:
                if any(p == key[0] for p, c in seen if c):
                    raise ValueError(f"prompt {key[0]} stands behind a completion of its own, at token {start}")
                root[key[0]] = i
            else:
                parents[i] = root.get(key[0], -1)
        return cls(starts, ends, parents)


MAX_ID = 2**31 - 1
"""The largest document id: masks may compare ids as int32."""
MAX_TOKENS = 2**22
"""Most tokens of a row. What is proven of masks holds up to here: their dtypes may round larger indices."""


@dataclass(frozen=True, eq=False)
class SpanRuns:
    """Spans of a row: tokens [starts[i], ends[i]) see each other in both directions under masks with `spans`.

    Args:
        starts, ends: (N,) int64, disjoint and ascending, none empty.
        ids: (N,) int64: tokens of one id are of one span, so that one document may have each id in one run only; None:
            every run is a span, which lies inside of one document.
        prefix: every span begins its document.
    """

    starts: Int
    ends: Int
    ids: Int | None = None
    prefix: bool = False

    @classmethod
    def of_ids(cls, values: ArrayLike, none: int) -> SpanRuns:
        """`values` (T,): the id of each token's span; up to `none`: it is of no span."""
        ids = whole_numbers("span ids", values)
        starts, ends = _runs(ids)
        real = ids[starts] > none
        return cls(starts[real], ends[real], ids[starts[real]])

    @classmethod
    def of_value(cls, values: ArrayLike, value: Sequence[int], prefix: bool) -> SpanRuns:
        """`values` (T,): tokens side by side that hold one of `value` are a span."""
        there = np.isin(whole_numbers("token types", values), value)
        starts, ends = _runs(there.astype(np.int64))
        real = there[starts]
        return cls(starts[real], ends[real], None, prefix)

    def split(self, seams: Sequence[int]) -> SpanRuns:
        """The same, with runs that go on behind a seam cut there: rows stand side by side."""
        at = np.asarray(seams, dtype=np.int64)
        run = np.searchsorted(self.starts, at) - 1  # the last run that begins before a seam
        inside = (run >= 0) & (np.append(self.ends, 0)[run] > at)
        at, run = at[inside], run[inside]
        starts, ends = np.sort(np.append(self.starts, at)), np.sort(np.append(self.ends, at))
        ids = None if self.ids is None else np.insert(self.ids, run + 1, self.ids[run])
        return SpanRuns(starts, ends, ids, self.prefix)

    def inside(self, documents: Documents) -> SpanRuns:
        """The spans as they lie in the documents.

        Raises:
            ValueError: one that goes on in another document or in padding, has tokens apart, or is no prefix.
        """
        real = documents.lengths > 0
        starts, ends = documents.starts[real], documents.ends[real]
        bounds = np.unique(np.concatenate([starts, ends]))
        cuts = np.unique(np.concatenate([self.starts, self.ends, bounds]))
        at, to = cuts[:-1], cuts[1:]
        run, doc = (np.searchsorted(each, at, side="right") - 1 for each in (self.starts, starts))
        held = (run >= 0) & (at < np.append(self.ends, 0)[run])
        real = held & (doc >= 0) & (at < np.append(ends, 0)[doc])
        parts = np.bincount(run[held], minlength=len(self.starts))
        padded = np.bincount(run[held & ~real], minlength=len(self.starts))
        cut = (parts > 1) & ((padded > 0) | (self.ids is None and not self.prefix))
        if cut.any():
            raise ValueError(
                f"the span at token {self.starts[cut.argmax()]} goes on behind its document: spans lie inside of one"
            )
        at, to, run, doc = at[real], to[real], run[real], doc[real]
        if self.prefix and (late := np.flatnonzero(at != starts[doc])).size:
            raise ValueError(
                f"the span at token {at[late[0]]} is no prefix: its document starts at {starts[doc[late[0]]]}"
            )
        if self.ids is None:
            return SpanRuns(at, to, None, self.prefix)
        pairs, counts = np.unique(np.stack([doc, self.ids[run]]), axis=1, return_counts=True)
        if (counts > 1).any():
            i = int(counts.argmax())
            raise ValueError(
                f"span id {pairs[1, i]} stands in {counts[i]} separate runs of the document at token "
                f"{starts[pairs[0, i]]}: the tokens of a span must be contiguous"
            )
        return SpanRuns(at, to, self.ids[run])

    def clipped(self, start: int, stop: int) -> SpanRuns:
        """Spans of tokens [start, stop), counted from there."""
        starts, ends = np.clip(self.starts, start, stop) - start, np.clip(self.ends, start, stop) - start
        real = ends > starts
        return SpanRuns(starts[real], ends[real], None if self.ids is None else self.ids[real], self.prefix)


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents of one row of `total` tokens: document i holds tokens [starts[i], starts[i] + lengths[i]).

    Documents are disjoint and in order. Tokens of no document are padding, which may stand before, between and after
    documents.

        row      0 1 2 3 4 5 6 7 8 9
        doc      A A A - B B B B - -      starts [0, 4], lengths [3, 4], total 10

    Args:
        starts: (N,) int64 first token of each document, ascending.
        lengths: (N,) int64 tokens of each document; 0 is allowed.
        total: tokens in the row, padding included.
        spans: of the row; None: the batch names none.
        nodes: of the row's trees, whose documents hold one tree each; None: it has none.
        before: tokens that the document at the row's start has in front of the row, which begins inside of it.
    Raises:
        ValueError: negative lengths, overlapping documents, or documents past `total`.
    """

    starts: Int
    lengths: Int
    total: int
    spans: SpanRuns | None = None
    nodes: Nodes | None = None
    before: int = 0

    def __post_init__(self) -> None:
        if self.starts.shape != self.lengths.shape or self.starts.ndim != 1:
            raise ValueError(f"starts {self.starts.shape} and lengths {self.lengths.shape} must be equal 1-d shapes")
        if (self.lengths < 0).any():
            raise ValueError(f"document lengths must be >= 0, got {int(self.lengths.min())}")
        ends = np.append(self.starts[1:], self.total)
        bad = np.flatnonzero((self.starts + self.lengths > ends) | (self.starts < 0))
        if bad.size:
            i = int(bad[0])
            raise ValueError(
                f"document {i} holds tokens [{self.starts[i]}, {self.starts[i] + self.lengths[i]}), "
                f"but the next document or the end of the row is at {ends[i]}"
            )

    @property
    def ends(self) -> Int:
        """(N,) int64: the token behind each document's last."""
        return self.starts + self.lengths

    @property
    def bounds(self) -> Int:
        """(N + 1,) int64: tokens [bounds[i], bounds[i + 1]) are document i with the padding that follows it.

        bounds[0] is 0 and bounds[-1] the total: padding before the first document counts to it.
        """
        return np.concatenate([[0], self.starts[1:], [self.total]]).astype(np.int64)

    def document_ids(self) -> Int:
        """(total,) int64 index of each token's document, -1 for padding."""
        ids = np.full(self.total, -1, dtype=np.int64)
        position = np.arange(int(self.lengths.sum())) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)
        ids[np.repeat(self.starts, self.lengths) + position] = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return ids

    def clipped(self, start: int, stop: int) -> Documents:
        """Documents of tokens [start, stop): what reaches in from outside is cut, others are empty."""
        starts, ends = (np.clip(bounds, start, stop) - start for bounds in (self.starts, self.ends))
        spans = None if self.spans is None else self.spans.clipped(start, stop)
        nodes = None if self.nodes is None else self.nodes.clipped(start, stop)
        return Documents(starts, ends - starts, stop - start, spans, nodes, 0 if start else self.before)

    def cut(self, size: int, of_row: bool = False) -> Documents:
        """The documents cut at multiples of `size` tokens, counted from each document's start or from the row's.

        row       0 1 2 3 4 5 6 7 8 9
        doc       A A A A A B B B B B
        cut(4)    A A A A|A|B B B B|B      of the row    A A A A|A|B B B|B B
        """
        real = self.lengths > 0
        starts, ends = self.starts[real], self.ends[real]
        origin = starts - (starts % size if of_row else (starts == 0) * (self.before % size))
        counts = -(-(ends - origin) // size)
        which = np.repeat(np.arange(len(starts)), counts)
        nth = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        begin = origin[which] + nth * size
        first, end = np.maximum(begin, starts[which]), np.minimum(begin + size, ends[which])
        return Documents(first, end - first, self.total)

    @classmethod
    def from_lengths(cls, lengths: ArrayLike, total: int | None = None) -> Documents:
        """`lengths` (N,), in tokens: documents one after another from the row's start; then padding up to `total`."""
        lens = whole_numbers("lengths", lengths)
        used = int(lens.sum())
        total = None if total is None else whole_number("total", total, 0)
        if total is not None and used > total:
            raise ValueError(f"lengths sum to {used} tokens, but the row has {total}")
        return cls(np.cumsum(lens) - lens, lens, used if total is None else total)

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: ArrayLike, total: int, cu_seqlens_padded: ArrayLike | None = None
    ) -> Documents:
        """`cu_seqlens` (N + 1,): running sum of the lengths, from 0. `cu_seqlens_padded` (N + 1,): where each
        document really starts, if padding stands between them (both as TransformerEngine takes them)."""
        cu = _cumulative("cu_seqlens", cu_seqlens)
        offsets = cu if cu_seqlens_padded is None else _cumulative("cu_seqlens_padded", cu_seqlens_padded)
        if offsets.shape != cu.shape:
            raise ValueError(f"cu_seqlens_padded has {offsets.size} entries, cu_seqlens has {cu.size}")
        if offsets[-1] > total:
            name = "cu_seqlens" if cu_seqlens_padded is None else "cu_seqlens_padded"
            raise ValueError(f"{name} ends at token {offsets[-1]}, but the row has {total}")
        return cls(offsets[:-1], np.diff(cu), total)

    @classmethod
    def from_position_ids(cls, position_ids: ArrayLike) -> Documents:
        """`position_ids` (T,): 0, 1, 2, … within each document; a document starts at every 0. The row may begin inside
        of a document, at a position above 0."""
        pos = whole_numbers("position_ids", position_ids)
        starts = np.flatnonzero(np.diff(pos, prepend=pos[:1] - 2) != 1).astype(np.int64)
        bad = starts[(pos[starts] != 0) & ((starts > 0) | (pos[starts] < 0))]
        if bad.size:
            raise ValueError(
                f"position_ids jump to {pos[bad[0]]} at token {bad[0]}: positions must count 0, 1, 2, … "
                f"within each document and restart at 0 with the next{_other_packing(pos, starts, int(bad[0]))}"
            )
        before = int(pos[0]) if pos.size else 0
        return cls(starts, np.diff(np.append(starts, pos.size)), pos.size, before=before)

    @classmethod
    def from_document_ids(cls, document_ids: ArrayLike, padding: int = -1) -> Documents:
        """`document_ids` (T,): one value per document, on all its tokens, which are contiguous; up to `padding`:
        padding."""
        ids = whole_numbers("document ids", document_ids)
        if ids.size and max(ids.max(), -ids.min()) > MAX_ID:
            raise ValueError(f"document ids go up to {MAX_ID}, got {ids.max()}: number the documents of a row anew")
        starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1) != 0).astype(np.int64)
        lengths = np.diff(np.append(starts, ids.size))
        keep = ids[starts] > padding
        values, counts = np.unique(ids[starts][keep], return_counts=True)
        if (counts > 1).any():
            raise ValueError(
                f"document id {values[counts > 1][0]} stands in {counts.max()} separate runs of tokens: "
                "the tokens of a document must be contiguous. "
                + (
                    "They count up as positions do: packing=PositionIds(…)"
                    if lengths.max() == 1
                    else "Number the documents of a row anew: (ids[:, 1:] != ids[:, :-1]).cumsum(1)"
                )
            )
        return cls(starts[keep], lengths[keep], ids.size)

    @classmethod
    def from_padding_mask(cls, mask: ArrayLike) -> Documents:
        """`mask` (T,): 1 on the tokens of the row's one document, which stand side by side; 0: padding."""
        marks = whole_numbers("the padding mask", mask)
        if marks.size and (marks.min() < 0 or marks.max() > 1):
            raise ValueError(f"a padding mask holds 0 and 1, got {marks.min()} to {marks.max()}")
        return cls.from_document_ids(marks, 0)

    @classmethod
    def from_end_tokens(cls, tokens: ArrayLike, token_id: int) -> Documents:
        """`tokens` (T,): documents end at each `token_id`, and the last one at the row's end."""
        ids = whole_numbers("tokens", tokens)
        return cls._from_starts(np.flatnonzero(ids[:-1] == token_id) + 1, ids.size)

    @classmethod
    def from_start_tokens(cls, tokens: ArrayLike, token_id: int) -> Documents:
        """`tokens` (T,): documents start at each `token_id`, and the first one at the row's start."""
        ids = whole_numbers("tokens", tokens)
        return cls._from_starts(np.flatnonzero(ids[1:] == token_id) + 1, ids.size)

    @classmethod
    def _from_starts(cls, later: Int, total: int) -> Documents:
        """Documents that tile the row. `later`: where all but the first one start."""
        starts = np.append(0, later).astype(np.int64)
        return cls(starts, np.diff(np.append(starts, total)), total)


def _other_packing(pos: NDArray[np.int64], starts: NDArray[np.int64], bad: int) -> str:
    """How position ids are packed that do not count from 0 in each document, with "; " in front, or "".

    pos: (T,). starts: where they do not count on. bad: the first of these that is no beginning.
    """
    tail = pos[bad:]
    if (pos[0] == 0 or bad > 1) and tail.size > 1 and (tail == tail[0]).all():
        return (
            f"; {tail[0]} from there to the end is padding: packing=PaddingMask('attention_mask'), or, of several "
            "documents, position_ids that count 0, 1, 2, … there, too"
        )
    if pos[starts].min() == pos[starts].max() > 0:
        return (
            f"; they begin at {pos[0]} in each document: packing=DocumentIds(…) or CuSeqlens(…) tell documents apart, "
            "WholeRows() says that a row is one"
        )
    return "; numbers of documents are packing=DocumentIds(…)" if (np.diff(pos) == 0).any() else ""


def _cumulative(name: str, values: ArrayLike) -> Int:
    cu = whole_numbers(name, values)
    if cu.size < 1 or cu[0] != 0 or (np.diff(cu) < 0).any():
        raise ValueError(f"{name} must start at 0 and never decrease, got {cu[:8].tolist()}…")
    return cu


def _runs(values: Int) -> tuple[Int, Int]:
    """(starts, ends) of the runs of equal values."""
    change = np.flatnonzero(np.diff(values)) + 1
    return np.append(0, change)[: values.size].astype(np.int64), np.append(change, values.size)[: max(1, values.size)]
