"""The packs that the benchmarks run: document lengths drawn from published distributions, and fixed ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LENGTHS = Path(__file__).resolve().parent.parent / "doc_lengths.json"


@dataclass(frozen=True)
class Pack:
    """Args: name. lengths: of the documents of one row, in tokens."""

    name: str
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def pairs(self) -> int:
        """Query-key pairs of causal attention."""
        return sum(length * (length + 1) // 2 for length in self.lengths)


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


def packs(world_size: int) -> list[Pack]:
    """All packs for a number of ranks. The seeds of web_mix give 27 and 49 documents in 32K tokens."""
    found = []
    seeds = {"web_mix": (176, 1176), "prolong": (42, 43), "long_tail": (42, 43)}
    for per_gpu in (8192, 32768):
        for name, pair in seeds.items():
            for seed in pair:
                lengths = draw(name, per_gpu * world_size, seed)
                found.append(Pack(f"{name} {per_gpu >> 10}K/GPU ({len(lengths)} docs)", lengths))
    found.append(Pack(f"one {8 * world_size}K document", (8192 * world_size,)))
    found.append(Pack(f"{16 * world_size} x 512", (512,) * (16 * world_size)))
    for number, lengths in enumerate(json.loads(LENGTHS.read_text())["ring_flash_attention_packs"]["packs"]):
        found.append(Pack(f"ring pack {number}", tuple(length * world_size for length in lengths)))
    return found
