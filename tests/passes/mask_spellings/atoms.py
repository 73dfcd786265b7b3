"""Atoms that masks are drawn from, right and wrong, by packing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from tests.passes.mask_spellings.base import COUNTED, MARK, OFFSETS, POSITIONS, Packing

Batch = dict[str, Tensor]
Atom = Callable[[Batch], Tensor]  # -> bool, broadcasts to (B, 1, T, T)


@dataclass(frozen=True)
class Expression:
    """A mask and how it is written."""

    text: str
    function: Atom

    def __repr__(self) -> str:
        return self.text


def index(b: Batch) -> Tensor:
    return torch.arange(b["input_ids"].shape[1])


def pairwise(x: Tensor, y: Tensor, op: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """(…, T) values of queries and of keys, compared as (B or 1, 1, T, T)."""
    q, k = x[..., :, None], y[..., None, :]
    return op(q, k)[:, None] if x.ndim > 1 else op(q, k)


def last_start(b: Batch) -> Tensor:
    """Where the last document up to each token starts; of the row's padding, the last document."""
    cu = b["cu_seqlens"]
    return cu[torch.bucketize(index(b), cu[:-1], right=True) - 1]


def before(marks: Tensor) -> Tensor:
    """Marks in front of each token; at the first one, of the whole row."""
    return marks.cumsum(1)[:, torch.arange(marks.shape[1]) - 1]


def rises(ids: Tensor) -> Tensor:
    return (ids.diff() != 0) & (ids[:, 1:] > 0)


RIGHT_IDS: dict[str, list[tuple[str, Atom]]] = {
    "position_ids": [
        ("cumsum(pos == 0)", lambda b: (b["position_ids"] == 0).cumsum(1)),
        ("cumsum(diff(pos) != 1)", lambda b: (positions(b).diff(prepend=positions(b)[:, :1]) != 1).cumsum(1)),
        ("cumsum(pos <= roll(pos))", lambda b: (b["position_ids"] <= b["position_ids"].roll(1, 1)).int().cumsum(-1)),
        ("i - pos", lambda b: index(b) - b["position_ids"]),
    ],
    "doc_ids": [
        ("ids", lambda b: b["doc_ids"]),
        ("3 * ids.float() - 1", lambda b: b["doc_ids"].float() * 3 - 1),
        ("cumsum(ids changes)", lambda b: F.pad(b["doc_ids"].diff() != 0, (1, 0)).cumsum(1)),
    ],
    "cu_seqlens": [
        ("searchsorted(right)", lambda b: torch.searchsorted(b["cu_seqlens"], index(b), right=True)),
        ("bucketize(cu[1:])", lambda b: torch.bucketize(index(b), b["cu_seqlens"][1:], right=True)),
        ("bucketize(cu[1:-1])", lambda b: torch.bucketize(index(b), b["cu_seqlens"][1:-1], right=True)),
        ("cu[bucketize(cu)]", lambda b: b["cu_seqlens"][torch.bucketize(index(b), b["cu_seqlens"], right=True) - 1]),
        ("cu[bucketize(cu[:-1])]", last_start),
        ("sum(cu <= i)", lambda b: (b["cu_seqlens"] <= index(b)[:, None]).sum(-1)),
    ],
    "counted_ids": [
        ("counted", lambda b: b["counted_ids"]),
        ("2 * counted.int()", lambda b: b["counted_ids"].double() * 2),
        ("cumsum(counted changes)", lambda b: F.pad(b["counted_ids"].diff() != 0, (1, 0)).cumsum(1)),
    ],
    "ended_ids": [
        ("cumsum(end) - end", lambda b: (b["ended_ids"] == MARK).cumsum(1) - (b["ended_ids"] == MARK).int()),
        ("pad(cumsum(end))", lambda b: F.pad((b["ended_ids"] == MARK).cumsum(1)[:, :-1], (1, 0))),
        ("cumsum(pad(end))", lambda b: F.pad(b["ended_ids"] == MARK, (1, -1)).cumsum(1)),
        ("where(cumsum[i - 1])", lambda b: torch.where(index(b) > 0, before(b["ended_ids"] == MARK), 0)),
    ],
    "started_ids": [
        ("cumsum(start)", lambda b: (b["started_ids"] == MARK).cumsum(1)),
        ("cumsum(pad(start[1:]))", lambda b: F.pad(b["started_ids"][:, 1:] == MARK, (1, 0)).int().cumsum(1)),
    ],
}  # fmt: skip
WRONG_IDS: list[tuple[str, Atom]] = [
    ("pos", lambda b: b["position_ids"]),
    ("tokens", lambda b: b["input_ids"]),
    ("cumsum(pos == 1)", lambda b: (b["position_ids"] == 1).cumsum(1)),
    ("cumsum(pos != 0)", lambda b: (b["position_ids"] != 0).cumsum(1)),
    ("roll(ids)", lambda b: b["doc_ids"].roll(1, 1)),
    ("row 0 of ids", lambda b: b["doc_ids"][:1].expand_as(b["doc_ids"])),
    ("cumsum(ids rise)", lambda b: F.pad(b["doc_ids"].diff() > 0, (1, 0)).cumsum(1)),
    ("searchsorted(left)", lambda b: torch.searchsorted(b["cu_seqlens"], index(b))),
    ("i // 2", lambda b: index(b) // 2),
    ("cumsum(end)", lambda b: (b["ended_ids"] == MARK).cumsum(1)),
    ("pad(cumsum(end), 2)", lambda b: F.pad((b["ended_ids"] == MARK).cumsum(1)[:, :-2], (2, 0))),
    ("cumsum(end)[i - 1]", lambda b: before(b["ended_ids"] == MARK)),
    ("cumsum(another end)", lambda b: before(b["ended_ids"] == 2) * (index(b) > 0)),
    ("cumsum(start) - start", lambda b: (b["started_ids"] == MARK).cumsum(1) - (b["started_ids"] == MARK).int()),
    ("cumsum(counted > 0)", lambda b: (b["counted_ids"] > 0).cumsum(1)),
    ("cumsum(counted changes to tokens)", lambda b: F.pad(rises(b["counted_ids"]), (1, 0)).cumsum(1)),
]
STARTS: dict[str, list[tuple[str, Atom]]] = {
    "position_ids": [
        ("i - pos", lambda b: index(b) - b["position_ids"]),
        ("cummax", lambda b: torch.where(b["position_ids"] == 0, index(b), 0).cummax(1).values),
        ("cummax of second", lambda b: torch.where(b["position_ids"] == 1, index(b), 0).cummax(1).values),
    ],
    "cu_seqlens": [
        ("cu[ids]", lambda b: b["cu_seqlens"][torch.searchsorted(b["cu_seqlens"], index(b), right=True) - 1]),
        ("cu[left ids]", lambda b: b["cu_seqlens"][torch.searchsorted(b["cu_seqlens"], index(b)) - 1]),
    ],
    "doc_ids": [("cummax", lambda b: (F.pad(b["doc_ids"].diff() != 0, (1, 0)) * index(b)).cummax(1).values)],
}
CHUNKS: list[tuple[str, Atom]] = [
    ("i // 4", lambda b: index(b) // 4),
    ("i - i % 5", lambda b: index(b) - index(b) % 5),
    ("pos // 3", lambda b: b["position_ids"] // 3),
    ("(i + 1) // 4", lambda b: (index(b) + 1) // 4),
]
SAME: list[tuple[str, Callable[[Tensor, Tensor], Tensor]]] = [
    ("==", torch.eq),
    ("not !=", lambda x, y: ~(x != y)),
    ("- == 0", lambda x, y: (x - y) == 0),
    ("|-| < 1", lambda x, y: (x - y).abs() < 1),
]
ORDER: list[tuple[str, Callable[[Tensor, Tensor], Tensor]]] = [
    (">=", torch.ge), (">", torch.gt), ("<=", torch.le), ("<", torch.lt), ("!=", torch.ne),
]  # fmt: skip


def same_atom(ids: Atom, op: Callable[[Tensor, Tensor], Tensor], b: Batch) -> Tensor:
    return pairwise(ids(b), ids(b), op)


def offset_atom(tokens: Atom, op: Callable[[Tensor, Tensor], Tensor], offset: int, b: Batch) -> Tensor:
    return pairwise(tokens(b), tokens(b) + offset, op)


def triangle(upper: bool, diagonal: int, b: Batch) -> Tensor:
    t = b["input_ids"].shape[1]
    ones = torch.ones(t, t, dtype=torch.bool)
    return ones.triu(diagonal) if upper else ones.tril(diagonal)


def one_side(name: str, query: bool, b: Batch) -> Tensor:
    x = b[name] > 2
    return x[:, None, :, None] if query else x[:, None, None, :]


def bound_atom(start: Atom, n: int, b: Batch) -> Tensor:
    """Keys from the query's `start + n` on."""
    at = start(b) + n
    return index(b) >= (at[:, None, :, None] if at.ndim > 1 else at[:, None])


def members(first: int, b: Batch) -> Tensor:
    """(T, T): one of the documents from number `first` on holds query and key."""
    cu, i = b["cu_seqlens"][first:], index(b)
    held = (i >= cu[:-1, None]) & (i < cu[1:, None])
    return (held[:, :, None] & held[:, None, :]).any(0)


def counted_above(query: bool, n: int, b: Batch) -> Tensor:
    x = b["counted_ids"] > n
    return x[:, None, :, None] if query else x[:, None, None, :]


def positions(b: Batch) -> Tensor:
    return b["position_ids"]


def atoms(packing: Packing, wrong: bool) -> st.SearchStrategy[Expression]:
    right = [
        Expression(f"same[{name} {sign}]", partial(same_atom, ids, op))
        for name, ids in RIGHT_IDS[packing.arg]
        for sign, op in SAME
    ]
    order = [
        Expression(f"(q {sign} k + {n})", partial(offset_atom, index, op, n))
        for sign, op in ORDER
        for n in range(-3, 4)
    ]
    order += [
        Expression(f"{'triu' if u else 'tril'}({d})", partial(triangle, u, d))
        for u in (False, True)
        for d in range(-3, 4)
    ]
    order += [
        Expression(f"chunk[{name} {sign}]", partial(same_atom, ids, op))
        for name, ids in CHUNKS
        for sign, op in SAME[:2]
    ]
    if packing == POSITIONS:
        order += [
            Expression(f"(pos_q {sign} pos_k + {n})", partial(offset_atom, positions, op, n))
            for sign, op in ORDER
            for n in (-2, 0, 1)
        ]
    order += [
        Expression(f"(k >= {name} + {n})", partial(bound_atom, at, n))
        for name, at in STARTS.get(packing.arg, [])
        for n in (-1, 0, 1)
    ]
    if packing == OFFSETS:
        order += [Expression(f"members[{n}:]", partial(members, n)) for n in (0, 0, 1)]
    if packing == COUNTED:
        order += [
            Expression(f"counted[{s}] > {n}", partial(counted_above, s == "q", n)) for s in "qk" for n in (-1, 0, 1)
        ]
    bad = [
        Expression(f"same[{name} {sign}]", partial(same_atom, ids, op))
        for name, ids in WRONG_IDS
        for sign, op in SAME[:2]
    ]
    bad += [
        Expression(f"{name}[{'q' if q else 'k'}] > 2", partial(one_side, name, q))
        for name in ("position_ids", "input_ids", "doc_ids")
        for q in (False, True)
    ]
    choices = [st.sampled_from(right), st.sampled_from(order)]
    return st.one_of(*choices, st.sampled_from(bad)) if wrong else st.one_of(*choices)
