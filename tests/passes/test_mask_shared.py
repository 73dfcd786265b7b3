"""Masks of spans and trees against brute force: what the matcher accepts equals the mask on every batch that is cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from cp_rewrite import PackedMask
from cp_rewrite.batch.read_documents import documents_of
from cp_rewrite.documents import Documents
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.match.find_sites import match_sites
from tests.passes.mask_spellings import LOWEST, capture, kept
from tests.passes.shared_masks import TOKENS, Atom, Batch, Kind, causal, draw_batch, kinds

KINDS = kinds()
Masks = Sequence[tuple[str, Atom]]
PER_GRAPH = 10
FORMS: list[Callable[[Tensor], Tensor]] = [
    lambda m: m,
    lambda m: torch.zeros(m.shape).masked_fill(~m, -torch.inf),
    lambda m: (1 - m.float()) * LOWEST,
    lambda m: torch.where(m, 0.0, -1.0),
]


def read(kind: Kind, masks: Masks, batch: Batch) -> list[PackedMask | None]:
    """What each mask is taken for; None: it is refused. One graph has them all."""

    def model(**b: Tensor) -> Tensor:
        x = b["input_ids"][:, None, :, None].float().expand(-1, 2, -1, 4)
        return torch.stack([F.scaled_dot_product_attention(x, x, x, attn_mask=mask(b)) for _, mask in masks]).sum(0)

    gm = capture(model, batch)
    found = match_sites(gm, kind.sharding, TokenAxis.read(gm, kind.sharding).unified())
    nodes = [node for node in gm.graph.nodes if node.target is F.scaled_dot_product_attention]
    assert len(nodes) == len(masks)
    read = {site.node: site.mask for site in found.sites}
    assert found.refusals or len(read) == len(nodes)
    return [read.get(node) for node in nodes]


def rows_of(kind: Kind, batch: Batch) -> list[Documents] | None:
    """The documents of a batch; None: it is refused."""
    try:
        return documents_of(kind.sharding, batch, len(batch["input_ids"]), TOKENS)
    except ValueError:
        return None


def compared(meaning: PackedMask, mask: Atom, text: str, batch: Batch, rows: Sequence[Documents]) -> int:
    """How many rows were compared: those whose spans fit."""
    seen = kept(mask(batch)).expand(len(rows), 1, TOKENS, TOKENS)[:, 0].numpy()
    count = 0
    for row, documents in enumerate(rows):
        try:
            expected = meaning.materialize(documents)
        except ValueError:
            continue
        real = documents.document_ids() >= 0
        assert not (seen[row] != expected)[real].any(), f"{text} was read as {meaning}: {batch}, row {row}"
        count += 1
    return count


def draw_mask(kind: Kind, rng: np.random.Generator) -> tuple[str, Atom]:
    """A right mask, changed in some places, or parts of one put together."""

    def part() -> tuple[str, Atom]:
        of = kind.wrong if rng.random() < 0.25 else kind.right
        name = str(rng.choice(list(of)))
        return name, of[name]

    def put(one: tuple[str, Atom], other: tuple[str, Atom]) -> tuple[str, Atom]:
        (a, x), (b, y) = one, other
        match rng.choice(["and", "and", "or", "or", "xor", "not"]):
            case "and":
                return f"({a} & {b})", lambda batch: x(batch) & y(batch)
            case "or":
                return f"({a} | {b})", lambda batch: x(batch) | y(batch)
            case "xor":
                return f"({a} ^ {b})", lambda batch: x(batch) ^ y(batch)
            case _:
                return f"({a} & ~{b})", lambda batch: x(batch) & ~y(batch)

    names = list(kind.whole)
    name = str(rng.choice(names))
    found = (name, kind.whole[name]) if rng.random() < 0.5 else put(part(), part())
    for _ in range(int(rng.integers(0, 4))):
        found = put(found, part()) if rng.random() < 0.5 else put(part(), found)
    text, mask = found
    if rng.random() < 0.4:
        text, mask = f"({text} & causal)", lambda batch, m=mask: m(batch) & causal(batch)
    form = int(rng.integers(0, len(FORMS))) if rng.random() < 0.3 else 0
    return f"{text} as {form}", lambda batch, m=mask: FORMS[form](m(batch))


def check(kind: Kind, graphs: int, seed: int) -> Counter[str]:
    """Reads masks, some to a graph, and compares those that are accepted. How many were what."""
    rng = np.random.default_rng(seed)
    batches: list[tuple[Batch, list[Documents]]] = []
    while len(batches) < 25:
        batch = draw_batch(rng)
        rows = rows_of(kind, batch)
        batches += [] if rows is None else [(batch, rows)]
    found: Counter[str] = Counter()
    for _ in range(graphs):
        masks = [draw_mask(kind, rng) for _ in range(PER_GRAPH)]
        for (text, mask), meaning in zip(masks, read(kind, masks, batches[0][0]), strict=True):
            found["masks"] += 1
            if meaning is None:
                continue
            found["spans" if meaning.spans else "tree" if meaning.tree else "plain"] += 1
            found["rows"] += sum(compared(meaning, mask, text, *batch) for batch in batches)
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_right_spellings_are_read(kind: Kind) -> None:
    rng = np.random.default_rng(0)
    for meaning in read(kind, list(kind.whole.items()), draw_batch(rng)):
        assert meaning is not None
        assert meaning.spans or meaning.tree


FLEX: dict[str, Callable[[Batch], Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]] = {
    "prompts": lambda b: (
        lambda i, _, q, k: (
            (b["prompt"][i, q] == b["prompt"][i, k])
            & ((b["completion"][i, k] == 0) | (b["completion"][i, q] == b["completion"][i, k]))
            & (q >= k)
        )
    ),
    "ranges": lambda b: (
        lambda i, _, q, k: (b["tin"][i, k] <= b["tin"][i, q]) & (b["tin"][i, q] < b["tout"][i, k]) & (q >= k)
    ),
    "places": lambda b: lambda i, _, q, k: (q < b["end"][i, k]) & (q >= k),
    "span ids": lambda b: (
        lambda i, _, q, k: (
            (b["doc_ids"][i, q] == b["doc_ids"][i, k])
            & ((q >= k) | ((b["span_ids"][i, q] == b["span_ids"][i, k]) & (b["span_ids"][i, q] > 0)))
        )
    ),
    "prefixes": lambda b: (
        lambda i, _, q, k: (b["doc_ids"][i, q] == b["doc_ids"][i, k]) & ((q >= k) | (b["types"][i, k] == 0))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name in FLEX], ids=lambda k: k.name)
def test_mask_functions_are_read(kind: Kind) -> None:
    def model(**b: Tensor) -> Tensor:
        rows, tokens = b["input_ids"].shape
        x = b["input_ids"][:, None, :, None].float().expand(-1, 2, -1, 16)
        mask = create_block_mask(FLEX[kind.name](b), rows, None, tokens, tokens, device="cpu")
        out = flex_attention(x, x, x, block_mask=mask)
        assert isinstance(out, Tensor)
        return out

    gm = capture(model, draw_batch(np.random.default_rng(0)))
    found = match_sites(gm, kind.sharding, TokenAxis.read(gm, kind.sharding).unified())
    assert [site.mask.spans or site.mask.tree for site in found.sites] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_drawn_masks_equal_brute_force(kind: Kind) -> None:
    found = check(kind, 15, 1)
    assert found["spans"] + found["tree"] > 0
    assert found["rows"] > found["masks"]
