"""Reads a drawn mask without Dynamo, and compares what it was taken for with what it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import sympy
import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from cp_rewrite import PackedMask
from cp_rewrite.batch.read_documents import documents_of
from cp_rewrite.documents import Documents
from cp_rewrite.passes.graph.canonicalize import Call, Canonical, Ref
from cp_rewrite.passes.predicate.decide import decide, index_of, read_mask
from cp_rewrite.passes.predicate.evaluate import Evaluator
from cp_rewrite.passes.predicate.recognise import Reader
from cp_rewrite.passes.predicate.symbolic import TOKENS as T
from cp_rewrite.refusal import Refusal
from tests.passes.mask_spellings import INF, LOWEST, kept

from .batches import PER_TOKEN, TOKENS, draw_batch
from .expressions import Batch, Indexed, Junction, Mask, View, changed
from .kinds import Kind

LONG = 29
"""Tokens of the rows that masks are read on: so many, or one more or less, stand for T, T + 1 and T - 1."""
ROWS = 2
SIZES = {n * LONG + d: n * T + d for n in (1, 2) for d in (-2, -1, 0, 1, 2)}


class Sizes(Evaluator):
    """Takes `LONG` for T."""

    def size(self, value: Any) -> Any:
        return SIZES[value] if type(value) is int and value in SIZES else super().size(value)


class Recorder(TorchDispatchMode):
    """Writes down every ATen call on real tensors, as `canonicalize` does on fake ones."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.refs: dict[int, Ref] = {}
        self.alive: list[Tensor] = []

    def ref(self, tensor: Tensor) -> Ref:
        if id(tensor) not in self.refs:
            self.refs[id(tensor)] = Ref(len(self.alive), tuple(tensor.shape), tensor.dtype)
            self.alive.append(tensor)
        return self.refs[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        flat = list(out) if isinstance(out, tuple | list) else [out]
        refs = tuple(self.ref(o) if isinstance(o, Tensor) else None for o in flat)
        named = (tree_map_only(Tensor, self.ref, args), tree_map_only(Tensor, self.ref, dict(kwargs or {})))
        if any(refs):
            self.calls.append(Call(func, *named, refs, None))
        return out


@cache
def placeholder(name: str) -> fx.Node:
    """A node that stands for an argument, or an index."""
    return fx.Graph().placeholder(name)


def record(function: Callable[[], Tensor], inputs: Mapping[str, Tensor]) -> Canonical:
    """The ATen calls by which `function` computes its result from `inputs`."""
    recorder = Recorder()
    leaves = {placeholder(name): recorder.ref(x) for name, x in inputs.items()}
    with torch.no_grad(), recorder:
        out = function()
    return Canonical(tuple(recorder.calls), leaves, {}, recorder.ref(out), False)


FORMS = ("bool", "additive", "flex")
Form = Callable[[Tensor], Tensor]
ADDED: tuple[tuple[str, Form], ...] = (
    ("masked_fill -inf", lambda m: torch.zeros(m.shape).masked_fill(~m, -INF)),
    ("where min", lambda m: torch.where(m, 0.0, LOWEST)),
    ("(1 - m) * min", lambda m: (1 - m.float()) * LOWEST),
    ("(1 - m) * -1e9 in bf16", lambda m: (1 - m.to(torch.bfloat16)) * -1e9),
    ("log", lambda m: m.float().log()),
    ("m * 1e9 - 1e9", lambda m: m.float() * 1e9 - 1e9),
)
MISADDED: tuple[tuple[str, Form], ...] = (
    ("-1", lambda m: torch.where(m, 0.0, -1.0)),
    ("-10000", lambda m: (1 - m.float()) * -10000),
    ("kept 1", lambda m: torch.where(m, 1.0, -INF)),
    ("float", lambda m: m.float()),
    ("min kept", lambda m: torch.where(m, LOWEST, 0.0)),
)


@dataclass(frozen=True)
class Drawn:
    """A mask and the form that it has: bool, additive or flex."""

    mask: Mask
    flex: bool = False
    added: tuple[str, Form] | None = None
    summed: bool = False  # the two parts of a junction are added up

    def __str__(self) -> str:
        how = "flex" if self.flex else "bool" if self.added is None else self.added[0]
        return f"{self.mask} as {how}{' of each part' * self.summed}"

    def dense(self, batch: Batch) -> Tensor:
        """The mask as a tensor: bool, or what is added to logits."""
        view = View(batch)
        if self.added is None:
            return self.mask.value(view)
        if self.summed and isinstance(self.mask, Junction) and self.mask.op == "&":
            x, y = (self.added[1](part.value(view)) for part in self.mask.parts)
            return x + y
        return self.added[1](self.mask.value(view))


def draw(kind: Kind, form: str, rng: np.random.Generator) -> Drawn:
    """A right mask of the kind, changed in one to four places."""
    mask = kind.whole[int(rng.integers(len(kind.whole)))]
    for _ in range(int(rng.integers(1, 5))):
        mask = changed(mask, kind.terms, kind.pool, rng)
    if form != "additive":
        return Drawn(mask, flex=form == "flex")
    forms = MISADDED if rng.random() < 0.1 else ADDED
    return Drawn(mask, added=forms[int(rng.integers(len(forms)))], summed=bool(rng.random() < 0.4))


@cache
def _to_read() -> dict[str, Tensor]:
    return draw_batch(np.random.default_rng(0), ROWS, LONG)


def read(kind: Kind, drawn: Drawn) -> PackedMask | list[Refusal]:
    """The meaning that the passes read off a mask, or why they refuse it."""
    inputs = inputs_of(kind, _to_read())
    rows = len(inputs["input_ids"])
    evaluator = Sizes(frozenset(), lambda node: node.name, document_ids=_ids(kind))
    sizes = [evaluator.size(size) for size in (rows, 2, LONG)]
    index = index_of(evaluator, sizes)
    if drawn.flex:
        places = {name: torch.tensor(0) for name in ("b", "h", "q", "k")}
        view = Indexed(inputs, places["b"], places["q"], places["k"])
        canonical = record(lambda: drawn.mask.value(view), inputs | places)
        evaluator.given.update({placeholder(name): at for name, at in zip(places, index, strict=True)})
    else:
        canonical = record(lambda: drawn.dense(inputs), inputs)
    value, pair = read_mask(evaluator.run(canonical), index, [*sizes, sizes[2]])
    if isinstance(value, Refusal):
        return [value]
    return decide(Reader(kind.sharding, evaluator.leaves, pair, frozenset({T})), value, placeholder("mask"))


def _ids(kind: Kind) -> str | None:
    packing = kind.sharding.packing
    name = type(packing).__name__
    return packing.arg if name in ("DocumentIds", "Tree") else None


def inputs_of(kind: Kind, batch: Batch) -> Batch:
    """A batch as the kind's packing takes it: `cu_seqlens` have one row."""
    if kind.sharding.packing.arg != "cu_seqlens":
        return batch
    return {name: x[:1] if name in PER_TOKEN else x for name, x in batch.items()}


@dataclass(frozen=True)
class Case:
    """A batch, and the documents of its rows."""

    batch: Batch
    rows: Sequence[Documents]
    known: dict[tuple[PackedMask, int], Any]

    def expected(self, meaning: PackedMask, row: int) -> Any:
        """(T, T) bool; None where such a row raises."""
        if (meaning, row) not in self.known:
            try:
                self.known[meaning, row] = meaning.materialize(self.rows[row])
            except ValueError:
                self.known[meaning, row] = None
        return self.known[meaning, row]


def cases(kind: Kind, rng: np.random.Generator, count: int = 25) -> list[Case]:
    """Batches that the host accepts."""
    found: list[Case] = []
    while len(found) < count:
        batch = inputs_of(kind, draw_batch(rng))
        try:
            rows = documents_of(kind.sharding, batch, len(batch["input_ids"]), TOKENS)
        except ValueError:
            continue
        found.append(Case(batch, rows, {}))
    return found


def compare(meaning: PackedMask, drawn: Drawn, against: Sequence[Case]) -> str | None:
    """Where a mask is not what it was taken for."""
    for case in against:
        seen = kept(drawn.dense(case.batch))
        seen = seen.expand(len(case.rows), 1, TOKENS, TOKENS)[:, 0].numpy()
        for row, documents in enumerate(case.rows):
            expected = case.expected(meaning, row)
            real = documents.document_ids() >= 0
            if expected is not None and (seen[row] != expected)[real].any():
                return f"{drawn} was read as {meaning}: {case.batch}, row {row}"
    return None


def run(kind: Kind, form: str, masks: int, seed: int) -> tuple[Counter[str], list[str]]:
    """(how many masks were accepted as what, refused and wrong; what was wrong)."""
    rng = np.random.default_rng(seed)
    against = cases(kind, rng)
    found: Counter[str] = Counter()
    wrong: list[str] = []
    for _ in range(masks):
        drawn = draw(kind, form, rng)
        meaning = read(kind, drawn)
        found["masks"] += 1
        if not isinstance(meaning, PackedMask):
            found["refused"] += 1
            continue
        found["accepted"] += 1
        found["spans" if meaning.spans else "tree" if meaning.tree else "chunk" if meaning.chunk else "plain"] += 1
        if (said := compare(meaning, drawn, against)) is not None:
            found["wrong"] += 1
            wrong.append(said)
    sympy.core.cache.clear_cache()
    return found, wrong
