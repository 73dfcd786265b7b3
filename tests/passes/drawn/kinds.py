"""Kinds of masks: the terms that they are written with, and right masks to begin with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import cp_rewrite as cp
from cp_rewrite.packing import Packing

from .batches import MARK, PER_TOKEN
from .expressions import Batch, Mask, Relation, Term, both, either


@dataclass(frozen=True)
class Kind:
    """An annotation, and what is written under it. whole: right masks. pool: parts. terms: what else is put in."""

    name: str
    sharding: cp.Sharding
    whole: tuple[Mask, ...]
    pool: tuple[Mask, ...]
    terms: tuple[Term, ...]


# -- terms ---------------------------------------------------------------------------------------------------


def index(b: Batch) -> Tensor:
    return torch.arange(b["input_ids"].shape[1])


def arg(name: str) -> Term:
    return Term(name, lambda b: b[name])


def made(name: str, function: Callable[[Batch], Tensor]) -> Term:
    return Term(name, function)


def of_index(name: str, function: Callable[[Tensor], Tensor]) -> Term:
    return Term(name, lambda b: function(index(b)), function)


def marks_before(marks: Tensor) -> Tensor:
    """Running sum of the marks in front of each token."""
    return F.pad(marks.long().cumsum(1)[:, :-1], (1, 0))


def group_numbers(marks: Tensor, outside: int) -> Tensor:
    """Runs of marked tokens, numbered from 0, as transformers numbers the images of Gemma 3."""
    before = F.pad(marks, (1, 0), value=0)[:, :-1]
    return torch.where(marks, torch.cumsum((marks & ~before).int(), dim=1) - 1, outside)


I = of_index("i", lambda i: i)  # noqa: E741
POS, IDS, COUNTED = arg("position_ids"), arg("doc_ids"), arg("counted_ids")
STRANGE = (
    arg("input_ids"), POS, IDS, COUNTED, arg("span_ids"), arg("types"), arg("prompt"), arg("completion"), arg("tin"),
    arg("tout"), arg("end"), of_index("i // 4", lambda i: i // 4), of_index("i % 3", lambda i: i % 3),
)  # fmt: skip


def positions(b: Batch) -> Tensor:
    return b["position_ids"]


NUMBERS: dict[str, tuple[Term, ...]] = {
    "position_ids": (
        made("cumsum(pos == 0)", lambda b: (positions(b) == 0).cumsum(1)),
        made("cumsum(diff(pos) != 1)", lambda b: (positions(b).diff(prepend=positions(b)[:, :1]) != 1).cumsum(1)),
        made("cumsum(pos <= roll(pos))", lambda b: (positions(b) <= positions(b).roll(1, 1)).int().cumsum(-1)),
        made("i - pos", lambda b: index(b) - positions(b)),
        made("cummax(pos == 0)", lambda b: torch.where(positions(b) == 0, index(b), 0).cummax(1)[0]),
    ),
    "doc_ids": (
        IDS,
        made("3 * ids - 1", lambda b: b["doc_ids"].double() * 3 - 1),
        made("cumsum(ids change)", lambda b: F.pad(b["doc_ids"].diff() != 0, (1, 0)).cumsum(1)),
    ),
    "counted_ids": (
        COUNTED,
        made("cumsum(counted changes)", lambda b: F.pad(b["counted_ids"].diff() != 0, (1, 0)).cumsum(1)),
    ),
    "cu_seqlens": (
        made("searchsorted", lambda b: torch.searchsorted(b["cu_seqlens"], index(b), right=True)),
        made("bucketize(cu[1:])", lambda b: torch.bucketize(index(b), b["cu_seqlens"][1:], right=True)),
        made("bucketize(cu[1:-1])", lambda b: torch.bucketize(index(b), b["cu_seqlens"][1:-1], right=True)),
        made("sum(cu <= i)", lambda b: (b["cu_seqlens"] <= index(b)[:, None]).sum(-1)),
    ),
    "ended_ids": (
        made("cumsum(end) - end", lambda b: (b["ended_ids"] == MARK).cumsum(1) - (b["ended_ids"] == MARK).int()),
        made("pad(cumsum(end))", lambda b: marks_before(b["ended_ids"] == MARK)),
        made("cumsum(pad(end))", lambda b: F.pad(b["ended_ids"] == MARK, (1, -1)).cumsum(1)),
    ),
    "started_ids": (
        made("cumsum(start)", lambda b: (b["started_ids"] == MARK).cumsum(1)),
        made("cumsum(pad(start[1:]))", lambda b: F.pad(b["started_ids"][:, 1:] == MARK, (1, 0)).int().cumsum(1)),
    ),
}  # fmt: skip
"""Terms that number documents, by the argument that tells them apart; one of `position_ids` is a bound, too."""


def starts(b: Batch) -> Tensor:
    cu = b["cu_seqlens"]
    return cu[torch.searchsorted(cu, index(b), right=True) - 1]


def last_starts(b: Batch) -> Tensor:
    cu = b["cu_seqlens"]
    return cu[torch.bucketize(index(b), cu[:-1], right=True) - 1]


def near_misses(name: str) -> tuple[Term, ...]:
    """Terms that almost number the documents that argument `name` tells apart."""

    def sums(of: str, value: int, shift: int, b: Batch) -> Tensor:
        marks = b[of] == value
        return F.pad(marks, (shift, -shift)).cumsum(1) if shift else marks.cumsum(1)

    by_value = {
        "position_ids": [(v, s) for v in (0, 1) for s in (0, 1, 2)],
        "ended_ids": [(v, s) for v in (MARK, 2) for s in (0, 1, 2)],
        "started_ids": [(v, s) for v in (MARK, 2) for s in (0, 1)],
        "counted_ids": [(0, 0), (1, 1)],
        "doc_ids": [(0, 0)],
    }
    out = [made(f"cumsum({name} == {v} >> {s})", partial(sums, name, v, s)) for v, s in by_value.get(name, [])]
    if name == "cu_seqlens":
        out += [
            made("searchsorted(left)", lambda b: torch.searchsorted(b["cu_seqlens"], index(b))),
            made("bucketize(cu[2:])", lambda b: torch.bucketize(index(b), b["cu_seqlens"][2:], right=True)),
            made("bucketize(cu[:-1])", lambda b: torch.bucketize(index(b), b["cu_seqlens"][:-1], right=True)),
            made("starts", starts),
            made("last starts", last_starts),
        ]  # fmt: skip
    else:
        out += [
            made(f"roll({name})", lambda b: b[name].roll(1, 1)),
            made(f"row 0 of {name}", lambda b: b[name][:1].expand_as(b[name])),
            made(f"cumsum({name} rises)", lambda b: F.pad(b[name].diff() > 0, (1, 0)).cumsum(1)),
            made(f"cumsum({name} != 0)", lambda b: (b[name] != 0).cumsum(1)),
        ]
    return tuple(out)


# -- kinds ---------------------------------------------------------------------------------------------------

CAUSAL = Relation(I, "q", ">=", I, "k")
ORDER: tuple[Mask, ...] = (
    CAUSAL,
    Relation(I, "k", "<=", I, "q"),
    *(Relation(I, "q", op, I, "k", n) for op in ("<", "<=", ">") for n in (-2, 0, 3, 6)),
    *(Relation(I, "k", op, I, "q", n) for op in ("<", ">=") for n in (-4, 2)),
    Relation(I, "q", "near", I, "k"),
)
WINDOWS: tuple[Mask, ...] = tuple(Relation(I, "q", "<", I, "k", n) for n in (3, 5))


def same(term: Term) -> Relation:
    return Relation(term, "q", "==", term, "k")


def equal(term: Term, side: str, value: int, op: str = "==") -> Relation:
    return Relation(term, "q" if side == "q" else "k", op, None, "k", value)


PACKINGS: tuple[Packing, ...] = (
    cp.PositionIds("position_ids"), cp.DocumentIds("doc_ids"), cp.DocumentIds("counted_ids", padding=0),
    cp.CuSeqlens("cu_seqlens"), cp.EndOfDocument("ended_ids", MARK), cp.StartOfDocument("started_ids", MARK),
)  # fmt: skip


def annotate(packing: Packing, spans: cp.Spans | None = None) -> cp.Sharding:
    return cp.Sharding(2, dict.fromkeys(PER_TOKEN, 1), packing, spans=spans)


def documents() -> list[Kind]:
    kinds: list[Kind] = []
    for packing in PACKINGS:
        numbers = NUMBERS[packing.arg]
        sames = [same(term) for term in numbers]
        bounds: list[Mask] = []
        if packing.arg == "cu_seqlens":
            bounds = [Relation(I, "k", ">=", made("starts", starts), "q")]
        if packing.arg == "position_ids":
            bounds = [Relation(I, "k", ">=", numbers[4], "q"), Relation(POS, "k", "<=", POS, "q")]
        whole = [*sames[:2], *(both(each, CAUSAL) for each in sames), *(both(sames[0], w, CAUSAL) for w in WINDOWS)]
        whole += [both(each, CAUSAL) for each in bounds[:1]] + [both(sames[0], Relation(I, "q", "near", I, "k"))]
        kinds.append(
            Kind(packing.arg, annotate(packing), tuple(whole), (*sames, *bounds, *ORDER),
                 (*numbers, *near_misses(packing.arg), I, *STRANGE))
        )  # fmt: skip
    return kinds


def chunk_terms(position: Term | None) -> tuple[Term, ...]:
    """Chunks of 4 tokens, and of others, of the row and of documents."""

    def of_positions(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> Term:
        return made(name, lambda b: function(positions(b), index(b)))

    row = [
        of_index("i // 4", lambda i: i // 4),
        of_index("i - i % 4", lambda i: i - i % 4),
        of_index("(i + 1) // 4", lambda i: (i + 1) // 4),
        of_index("i // 3", lambda i: i // 3),
        of_index("i % 4", lambda i: i % 4),
    ]
    if position is None:
        return tuple(row)
    return (
        of_positions("pos // 4", lambda p, _: p // 4),
        of_positions("i - pos % 4", lambda p, i: i - p % 4),
        *row,
        of_positions("pos // 3", lambda p, _: p // 3),
        of_positions("pos % 4", lambda p, _: p % 4),
        of_positions("(pos + 1) // 4", lambda p, _: (p + 1) // 4),
    )


def chunks() -> list[Kind]:
    kinds: list[Kind] = []
    for packing in PACKINGS[:4]:
        numbers = NUMBERS[packing.arg]
        terms = chunk_terms(POS if packing.arg == "position_ids" else None)
        doc = same(numbers[0])
        ways: list[Mask] = [same(terms[0]), same(of_index("i // 4", lambda i: i // 4))]
        ways += [both(CAUSAL, Relation(I, "k", ">=", terms[1], "q"))]
        whole = [both(doc, way, *rest) for way in ways for rest in ((CAUSAL,), (WINDOWS[0], CAUSAL))]
        whole += [both(doc, way) for way in ways]
        kinds.append(
            Kind(f"chunks of {packing.arg}", annotate(packing), tuple(whole), (doc, *ways, *ORDER),
                 (*terms, *terms, *numbers, *near_misses(packing.arg), I, *STRANGE))
        )  # fmt: skip
    return kinds


def spans() -> list[Kind]:
    docs, doc = cp.DocumentIds("doc_ids"), same(IDS)
    ids, types, flags = arg("span_ids"), arg("types"), arg("flags")
    images = [made(f"groups of {v}, else {o}", partial(lambda v, o, b: group_numbers(b["types"] == v, o), v, o))
              for v, o in ((1, -1), (1, 0), (0, -1))]  # fmt: skip
    flagged = [
        made(f"groups of flags, else {o}", partial(lambda o, b: group_numbers(b["flags"], o), o)) for o in (-1, 0)
    ]
    numbered = made("numbers of flags", lambda b: (b["flags"] & ~F.pad(b["flags"], (1, 0))[:, :-1]).cumsum(1))
    seen = made("groups of 1 and 2", lambda b: group_numbers((b["types"] == 1) | (b["types"] == 2), -1))
    by_ids = both(same(ids), equal(ids, "q", 0, ">"))
    by_types = both(same(types), equal(types, "k", -1, ">"))
    image = both(same(images[0]), equal(images[0], "q", 0, ">="))
    flag = both(same(numbered), equal(flags, "q", 1), equal(flags, "k", 1))
    prefix = equal(types, "k", 0)
    terms = (ids, types, seen, *images, *flagged, numbered, IDS, I, *STRANGE)
    parts: tuple[Mask, ...] = (doc, by_ids, by_types, image, flag, prefix, *ORDER)

    def kind(name: str, spans: cp.Spans, *ways: Mask) -> Kind:
        whole = [both(doc, either(CAUSAL, way)) for way in ways]
        whole += [both(doc, either(both(CAUSAL, WINDOWS[1]), way)) for way in ways if not spans.prefix]
        whole += [either(both(doc, CAUSAL), way) for way in ways if spans.value == 1]
        return Kind(name, annotate(docs, spans=spans), tuple(whole), (*ways, *ways, *parts), (*terms, *terms[:5]))

    return [
        kind("span ids", cp.Spans("span_ids"), by_ids),
        kind("span ids from 0", cp.Spans("types", none=-1), by_types),
        kind("images", cp.Spans("types", value=1), image),
        kind("images of two types", cp.Spans("types", value=(1, 2)), both(same(seen), equal(seen, "q", 0, ">="))),
        kind("flags", cp.Spans("flags", value=1), flag, both(same(flagged[0]), equal(flagged[0], "k", 0, ">="))),
        kind("prefixes", cp.Spans("types", value=0, prefix=True), prefix, both(prefix, equal(types, "q", 0))),
    ]


def level_up(levels: int, b: Batch) -> Tensor:
    """The node so many levels above each token's, by the parents that nodes tell."""
    node, rows = b["segment"], torch.arange(len(b["segment"]))[:, None]
    for level in range(levels):
        node = b["parents"].gather(1, node.clamp(min=0)) if level == 0 else b["parents"][rows, node]
    return node


def trees() -> list[Kind]:
    prompt, completion, tin, tout, end = (arg(n) for n in ("prompt", "completion", "tin", "tout", "end"))
    own = either(equal(completion, "k", 0), same(completion))
    within = both(Relation(tin, "k", "<=", tin, "q"), Relation(tin, "q", "<", tout, "k"))
    nested = both(Relation(tin, "k", "<=", tin, "q"), Relation(tout, "q", "<=", tout, "k"))
    up_to = Relation(I, "q", "<", end, "k")
    parts = (same(prompt), own, equal(completion, "k", 0), same(completion), within, nested, up_to, *ORDER)
    terms = (prompt, completion, tin, tout, end, I, *STRANGE)

    nodes = [made(f"{n} levels up", partial(level_up, n)) for n in range(4)]
    chain = [Relation(node, "q", "==", nodes[0], "k") for node in nodes]

    def kind(name: str, packing: cp.Tree, mine: Sequence[Mask], *whole: Mask, more: Sequence[Term] = ()) -> Kind:
        every = (*more, *more, *terms)
        return Kind(name, annotate(packing), tuple(both(w, CAUSAL) for w in whole), (*mine, *mine, *parts), every)

    ranges = [within, nested, Relation(tin, "k", "<=", tin, "q"), Relation(tin, "q", "<", tout, "k")]
    return [
        kind(
            "tree of prompts", cp.Tree("prompt", completion="completion"), [same(prompt), own], both(same(prompt), own)
        ),
        kind("tree of ranges", cp.Tree("tout", tin="tin"), ranges, within, nested),
        kind("tree of places", cp.Tree("end"), [up_to], up_to, replace(up_to, op="<")),
        kind(
            "tree of parents",
            cp.Tree("segment", parents="parents"),
            chain,
            chain[0],
            either(*chain[:2]),
            either(*chain[:3]),
            either(*chain),
            more=nodes,
        ),
    ]


KINDS: dict[str, Callable[[], list[Kind]]] = {"documents": documents, "chunks": chunks, "spans": spans, "trees": trees}
