"""Trees of runs of tokens that share what stands before them: one prompt, many completions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .arguments import whole_numbers

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
        """Those of tokens [start, stop), counted from there; what is above them must be there too."""
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
