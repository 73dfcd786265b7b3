"""Random masks, right and wrong, against brute force: what the matcher accepts equals the mask on every batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cp_rewrite import Documents, PackedMask, Reason
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.match.find_sites import match_sites
from tests.helpers.amount import drawn
from tests.passes.mask_spellings import (
    COUNTED,
    DOCUMENTS,
    ENDED,
    INF,
    LOWEST,
    OFFSETS,
    POSITIONS,
    STARTED,
    Packing,
    annotate,
    attend,
    capture,
    kept,
    tokens_of_documents,
)
from tests.passes.mask_spellings.base import MARK

pytestmark = pytest.mark.long

Batch = dict[str, Tensor]
Atom = Callable[[Batch], Tensor]  # -> bool, broadcasts to (B, 1, T, T)
TOKENS = 14
MASK_REASONS = {r for r in Reason if r.name.startswith("MASK_")}


@dataclass(frozen=True)
class Expression:
    """A mask and how it is written."""

    text: str
    function: Atom

    def __repr__(self) -> str:
        return self.text


# -- batches -------------------------------------------------------------------------------------------------


def batches(packing: Packing, rows: list[list[int]], padded: bool) -> tuple[Batch, list[Documents]]:
    """Rows of TOKENS tokens; with `padded`, each row's last document is padding where the packing knows any, and where
    ids tell it the second one too."""
    lengths = [[*row, TOKENS - sum(row)] for row in rows]
    docs = [Documents.from_lengths(row) for row in lengths]
    positions = np.concatenate([np.concatenate([np.arange(n) for n in row]) for row in lengths]).reshape(-1, TOKENS)
    ids = np.stack([(d.document_ids() * 7 + 3) % 11 for d in docs])
    cu = np.cumsum([0, *lengths[0]])
    tokens = tokens_of_documents(torch.from_numpy(positions))
    if padded and packing in (DOCUMENTS, COUNTED):
        keep = [np.delete(np.arange(len(d.lengths)), [len(d.lengths) - 1, min(1, len(d.lengths) - 1)]) for d in docs]
        real = np.stack([np.isin(d.document_ids(), k) for d, k in zip(docs, keep, strict=True)])
        ids = np.where(real, ids, -1)
        tokens["counted_ids"] = tokens["counted_ids"] * torch.from_numpy(real)
        docs = [Documents(d.starts[k], d.lengths[k], TOKENS) for d, k in zip(docs, keep, strict=True)]
    if padded and packing == OFFSETS:
        cu = cu[:-1]
        docs = [Documents.from_lengths(row[:-1], TOKENS) for row in lengths]
    batch = {
        "input_ids": torch.arange(positions.size).view(positions.shape) * 5 % 7,
        "position_ids": torch.from_numpy(positions),
        "doc_ids": torch.from_numpy(ids),
        "cu_seqlens": torch.from_numpy(cu),
        **tokens,
    }
    return batch, docs


def rows_of(draw: Any, count: int) -> list[list[int]]:
    """Cuts of each row, the last document left out; lengths of 1 and of the whole row among them."""
    rows: list[list[int]] = []
    for _ in range(count):
        cuts = sorted(draw(st.sets(st.integers(1, TOKENS - 1), max_size=5)))
        rows.append(np.diff([0, *cuts]).tolist())
    return rows


# -- atoms ---------------------------------------------------------------------------------------------------


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
    """Whether one of the documents from `first` on holds query and key."""
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


def combine(children: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    def both(op: str, function: Any) -> Callable[[Expression, Expression], Expression]:
        return lambda x, y: Expression(f"({x} {op} {y})", lambda b: function(x.function(b), y.function(b)))

    def negated(x: Expression) -> Expression:
        return Expression(f"~{x}", lambda b: ~x.function(b))

    def multiplied(x: Expression, y: Expression) -> Expression:
        return Expression(f"({x} * {y})", lambda b: (x.function(b).int() * y.function(b).int()) != 0)

    ands = st.builds(both("&", torch.logical_and), children, children)
    return st.one_of(
        ands,
        ands,
        ands,
        st.builds(both("|", torch.logical_or), children, children),
        st.builds(both("^", torch.logical_xor), children, children),
        st.builds(multiplied, children, children),
        st.builds(negated, children),
    )


FORMS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("bool", lambda m: m),
    ("masked_fill -inf", lambda m: torch.zeros(m.shape).masked_fill(~m, -INF)),
    ("where min", lambda m: torch.where(m, 0.0, LOWEST)),
    ("(1 - m) * min", lambda m: (1 - m.float()) * LOWEST),
    ("log", lambda m: m.float().log()),
    ("two sums", lambda m: torch.where(m, 0.0, LOWEST) + torch.zeros(m.shape).masked_fill(~m, LOWEST)),
    ("-1", lambda m: torch.where(m, 0.0, -1.0)),
    ("kept 1", lambda m: torch.where(m, 1.0, -INF)),
    ("float", lambda m: m.float()),
    ("(1 - m) * -inf", lambda m: (1 - m.float()) * -INF),
    ("min kept", lambda m: torch.where(m, LOWEST, 0.0)),
]


@st.composite
def cases(
    draw: Any, packing: Packing
) -> tuple[Packing, Expression, str, Any, bool, list[tuple[Batch, list[Documents]]]]:
    wrong = draw(st.booleans())
    tree = draw(st.recursive(atoms(packing, wrong), combine, max_leaves=4))
    same = draw(atoms(packing, wrong=False).filter(lambda e: e.text.startswith("same")))
    if draw(st.integers(0, 4)):  # most random trees say nothing about documents
        inner = tree
        tree = Expression(f"({same} & {inner})", lambda b: same.function(b) & inner.function(b))
    form, make = draw(st.sampled_from(FORMS)) if draw(st.booleans()) else FORMS[0]
    padded = draw(st.booleans())
    seen = [batches(packing, rows_of(draw, 2), padded) for _ in range(4)]
    return packing, tree, form, make, draw(st.booleans()), seen


def check(case: tuple[Packing, Expression, str, Any, bool, list[tuple[Batch, list[Documents]]]]) -> PackedMask | None:
    """Match the mask; compare it with brute force where it was accepted."""
    packing, tree, form, make, dynamic, seen = case

    def mask(**b: Tensor) -> Tensor:
        return make(tree.function(b))

    gm = capture(lambda **b: attend(mask, **b), seen[0][0], dynamic=dynamic)
    sharding = annotate(packing)
    found = match_sites(gm, sharding, TokenAxis.read(gm, sharding).unified())
    sites, refusals = found.sites, found.refusals
    assert len(sites) + bool(refusals) == 1
    assert {r.reason for r in refusals} <= MASK_REASONS
    assert all(r.detail for r in refusals)
    for site in sites:
        for batch, docs in seen:
            assert_equal(site.mask, mask(**batch), packing, batch, docs, f"{tree} as {form}")
    return sites[0].mask if sites else None


def assert_equal(
    meaning: PackedMask, mask: Tensor, packing: Packing, batch: Batch, docs: list[Documents], text: str
) -> None:
    assert mask.dtype == torch.bool or not torch.isnan(mask).any(), text
    rows = 1 if packing == OFFSETS else 2
    whole = kept(mask).expand(2, 1, TOKENS, TOKENS) if mask.ndim > 2 else kept(mask).expand(2, 1, -1, -1)
    for row in range(rows):
        expected = meaning.materialize(docs[row] if meaning.packed else [TOKENS])
        real = docs[row].document_ids() >= 0
        difference = (whole[row, 0].numpy() != expected)[real]
        assert not difference.any(), f"{text} was read as {meaning}, documents {docs[row].lengths}"


PACKINGS = [POSITIONS, DOCUMENTS, OFFSETS, COUNTED, ENDED, STARTED]


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda p: p.arg)
def test_accepted_masks_equal_brute_force(packing: Packing) -> None:
    """Many are accepted and many refused, or the drawing is bad."""
    verdicts: list[PackedMask | None] = []

    @drawn(200, quick=5)
    @given(cases(packing))
    def run(case: Any) -> None:
        verdicts.append(check(case))

    run()
    assert any(v is not None for v in verdicts)
    assert any(v is None for v in verdicts)
