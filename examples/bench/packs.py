"""The packs that the benchmarks run: document lengths drawn from published distributions, and fixed ones."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from cp_rewrite.documents import Documents, Nodes, SpanRuns
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.sections import sections_of

LENGTHS = Path(__file__).resolve().parent.parent / "doc_lengths.json"


@dataclass(frozen=True)
class Pack:
    """Args: name. lengths: of the documents of one row, in tokens. mask: of its attention. spans, nodes: of the row."""

    name: str
    lengths: tuple[int, ...]
    mask: PackedMask = field(default_factory=PackedMask)
    spans: SpanRuns | None = None
    nodes: Nodes | None = None

    @property
    def documents(self) -> Documents:
        return replace(Documents.from_lengths(self.lengths), spans=self.spans, nodes=self.nodes)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def pairs(self) -> int:
        """Query-key pairs of attention under the mask, which has no window."""
        s = sections_of(self.documents, self.mask)
        sizes = s.ends - s.starts
        return int((sizes * s.before + np.where(s.full, sizes**2, sizes * (sizes + 1) // 2)).sum())


def draw(name: str, tokens: int, seed: int) -> tuple[int, ...]:
    """Lengths from the distribution's bins (their midpoints), documents cut at a quarter of the pack, the last one at
    its end."""
    bins = json.loads(LENGTHS.read_text())[name]["bins"]
    weights = np.array([count for _, _, count in bins], dtype=np.float64)
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    left = tokens
    while left:
        low, high, _ = bins[rng.choice(len(bins), p=weights / weights.sum())]
        length = max(1, (low + high) // 2)
        while length and left:
            part = min(length, tokens // 4, left)
            lengths.append(part)
            length, left = length - part, left - part
    return tuple(lengths)


TABLE = ("web_mix", "one", "x 512")
"""Texts in the names of the six packs of RESULTS.md's tables."""


def packs(world_size: int, k: int = 1024) -> list[Pack]:
    """All packs for a number of ranks, with `k` tokens to a K. The seeds of web_mix give 27 and 49 documents in 32K."""
    found = []
    seeds = {"web_mix": (176, 1176), "prolong": (42, 43), "long_tail": (42, 43)}
    for per_gpu in (8, 32):
        for name, pair in seeds.items():
            for seed in pair:
                lengths = draw(name, per_gpu * k * world_size, seed)
                found.append(Pack(f"{name} {per_gpu}K/GPU ({len(lengths)} docs)", lengths))
    found.append(Pack(f"one {8 * world_size}K document", (8 * k * world_size,)))
    found.append(Pack(f"{16 * world_size} x 512", (k // 2,) * (16 * world_size)))
    for number, lengths in enumerate(json.loads(LENGTHS.read_text())["ring_flash_attention_packs"]["packs"]):
        found.append(Pack(f"ring pack {number}", tuple(length * world_size for length in lengths)))
    return found


def table_packs(world_size: int, k: int = 1024) -> list[Pack]:
    """The six of RESULTS.md's tables."""
    return [pack for pack in packs(world_size, k) if any(text in pack.name for text in TABLE)]


def drawn_packs(world_size: int, seed: int, k: int = 1024) -> list[Pack]:
    """Six packs that nobody has chosen: each distribution once at 8K and once at 16K to 32K tokens of each GPU."""
    rng, found = np.random.default_rng(seed), list[Pack]()
    for number, name in enumerate(("web_mix", "prolong", "long_tail") * 2):
        per_gpu = 8 if number < 3 else int(rng.integers(16, 33))
        lengths = draw(name, per_gpu * k * world_size, int(rng.integers(1 << 30)))
        found.append(Pack(f"drawn {number} of {seed}: {name} {per_gpu}K/GPU ({len(lengths)} docs)", lengths))
    return found


def with_prefixes(name: str, lengths: tuple[int, ...], share: float) -> Pack:
    """Documents whose first tokens, a share of them, see each other."""
    ends = np.cumsum(lengths)
    starts = ends - np.array(lengths)
    return Pack(
        name, lengths, PackedMask(spans=True), SpanRuns(starts, starts + np.ceil(share * (ends - starts)).astype(int))
    )


def with_images(name: str, lengths: tuple[int, ...], size: int, every: int) -> Pack:
    """Documents with an image of `size` tokens in every `every` tokens."""
    ends = np.cumsum(lengths)
    starts = ends - np.array(lengths)
    images = np.concatenate([np.arange(a + size, b - size, every) for a, b in zip(starts, ends, strict=True)])
    return Pack(name, lengths, PackedMask(spans=True), SpanRuns(images, images + size))


def rollouts(name: str, prompts: int, prompt: int, completions: int, length: int, copies: bool = False) -> Pack:
    """Prompts with completions behind each, as trees; or `copies` of the prompt, one before each completion."""
    if copies:
        return Pack(name, (prompt + length,) * (prompts * completions))
    sizes = np.tile([prompt, *[length] * completions], prompts)
    ends = np.cumsum(sizes)
    root = np.arange(len(sizes)) // (completions + 1) * (completions + 1)
    parents = np.where(np.arange(len(sizes)) == root, -1, root)
    lengths = (prompt + completions * length,) * prompts
    return Pack(name, lengths, PackedMask(tree=True), nodes=Nodes(ends - sizes, ends, parents))


def binary_tree(name: str, depth: int, length: int) -> Pack:
    """One tree: every node of `length` tokens has two children, down to `depth`."""
    order: list[int] = []

    def walk(parent: int, left: int) -> None:
        order.append(parent)
        node = len(order) - 1
        for _ in range(2 if left > 1 else 0):
            walk(node, left - 1)

    walk(-1, depth)
    ends = np.cumsum(np.full(len(order), length))
    return Pack(name, (int(ends[-1]),), PackedMask(tree=True), nodes=Nodes(ends - length, ends, np.array(order)))


def mask_packs(world_size: int) -> list[Pack]:
    """Packs under masks beyond documents; the copies of a tree stand behind it."""
    mixed = draw("prolong", 16384 * world_size, 42)
    return [
        Pack("chunks of 8K", mixed, PackedMask(chunk=8192)),
        Pack("chunks of 2K", mixed, PackedMask(chunk=2048)),
        with_prefixes("prefixes of half a document", mixed, 0.5),
        with_images("images of 256 in every 2K", mixed, 256, 2048),
        rollouts("GRPO, 8 x 2K behind 16K", 1, 16384, 8, 2048),
        rollouts("GRPO, 8 x 2K behind 16K, copies", 1, 16384, 8, 2048, copies=True),
        rollouts("GRPO, 4 prompts of 2K with 8 x 1K", 4, 2048, 8, 1024),
        rollouts("GRPO, 4 prompts of 2K with 8 x 1K, copies", 4, 2048, 8, 1024, copies=True),
        binary_tree("tree of 5 levels, 1K each", 5, 1024),
    ]
