"""The cells of the conformance table: what is attended to, and how."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from cp_rewrite.documents import Documents
from cp_rewrite.kernels.select import Params
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.names import LAYOUTS, ExchangeName
from tests.helpers.packs import MASKS, grown

EXCHANGES = tuple(name for name in get_args(ExchangeName) if name != "auto")
_PLAIN = {
    # Lengths that nothing divides, of 0 and of 1; more capacity than documents; gaps after each document; two rows.
    "none": (Documents.from_lengths([13, 0, 1, 7, 29, 2, 1]),),
    "tail": (Documents.from_lengths([21, 1, 17], 60),),
    "between": (Documents.from_cu_seqlens([0, 5, 6, 6, 29], 48, [0, 8, 9, 16, 48]),),
    "two rows": (Documents.from_lengths([9, 30, 1], 44), Documents.from_cu_seqlens([0, 3, 20], 44, [0, 4, 44])),
    "empty ranks": (Documents.from_lengths([3]),),
}
_LONG = {
    # Around kernels' tiles and far from them.
    "dense": (Documents.from_lengths([700, 33, 1, 1500, 301, 128]),),
    "tail of 366": (Documents.from_lengths([700, 33, 1, 1500], 2600),),
    "gaps": (Documents.from_cu_seqlens([0, 640, 673, 674, 2000], 2600, [0, 704, 768, 800, 2200]),),
}
PACKS = {name: tuple(grown(row, i) for i, row in enumerate(rows)) for name, rows in _PLAIN.items()}
LONG_PACKS = {name: tuple(grown(row, 0, 200) for row in rows) for name, rows in _LONG.items()}
TE_SIZES = {"s 256": 256, "s 4096": 4096}


def te_packs(name: str, size: int) -> dict[str, tuple[Documents, ...]]:
    """TransformerEngine's batches: two documents of up to `size` tokens, without and with padding to that."""
    lengths = [size * 3001 // 4096, size * 1777 // 4096]
    padded = Documents.from_cu_seqlens([0, lengths[0], sum(lengths)], 2 * size, [0, size, 2 * size])
    return {f"b 2, {name}": (Documents.from_lengths(lengths),), f"b 2, {name}, padded": (padded,)}


ROWS = PACKS | LONG_PACKS | te_packs("s 256", 256) | te_packs("s 4096", 4096)
TE_SHAPES = (
    ((12, 12), (128, 128)), ((32, 4), (128, 128)), ((12, 2), (128, 128)), ((32, 32), (128, 128)),
    ((128, 128), (192, 128)), ((12, 12), (192, 128)), ((128, 128), (128, 64)), ((12, 12), (128, 64)),
    ((64, 8), (64, 64)),
)  # fmt: skip
HEADS = ((4, 4), (8, 2), (4, 1), (12, 2), (3, 3), (6, 2))
DIMS = ((8, 8), (24, 16), (16, 8), (64, 64), (192, 128), (128, 64), (256, 256))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Cell:
    """One case: what is attended to, and how."""

    exchange: str
    layout: str
    mask: PackedMask
    padding: str
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype
    world_size: int
    sinks: bool = False
    softcap: float = 0.0
    kernel: str = "reference"
    keep_kv: bool = False
    deterministic: bool = True

    @property
    def rows(self) -> tuple[Documents, ...]:
        """The batch."""
        return ROWS[self.padding]

    @property
    def params(self) -> Params:
        return Params(self.dims[0] ** -0.5, self.softcap, self.deterministic)

    def padding_rows(self) -> Tensor:
        """(B T,) bool: rows of no document."""
        return torch.from_numpy(np.concatenate([row.document_ids() < 0 for row in self.rows]))

    def __str__(self) -> str:
        named = {"sinks": self.sinks, "soft cap": self.softcap, "keep_kv": self.keep_kv}
        extras = [name for name, on in named.items() if on]
        columns = (
            self.exchange, self.layout, self.mask, self.padding, f"{self.heads[0]}/{self.heads[1]}",
            f"{self.dims[0]}/{self.dims[1]}", str(self.dtype).removeprefix("torch."), self.world_size,
            ", ".join(extras) or "–",
        )  # fmt: skip
        return " | ".join(map(str, columns))


HEADER = "exchange | layout | mask | padding | heads | head dims | dtype | ranks | extras"


def cells() -> list[Cell]:
    """Every exchange x layout x mask x padding x ranks, then every exchange x heads x dims x dtype, what is left open
    drawn (always alike, so that any two values of two columns meet); then TransformerEngine's."""
    draw = random.Random(0)
    found = [
        _drawn(
            Cell(
                exchange, layout, mask, padding, draw.choice(HEADS), draw.choice(DIMS[:3]), draw.choice(DTYPES), ranks
            ),
            draw,
        )
        for exchange in EXCHANGES
        for layout, mask, padding in itertools.product(LAYOUTS, MASKS, PACKS)
        for ranks in ranks_of(exchange)
    ]
    for exchange, heads, dims, dtype in itertools.product(EXCHANGES, HEADS, DIMS, DTYPES):
        layout, mask, padding = draw.choice(LAYOUTS), draw.choice(MASKS), draw.choice(tuple(PACKS))
        cell = Cell(exchange, layout, mask, padding, heads, dims, dtype, draw.choice(ranks_of(exchange)))
        found.append(_drawn(cell, draw))
    return found + te_cells("s 256")


def _drawn(cell: Cell, draw: random.Random) -> Cell:
    """The cell with extras."""
    keeps = draw.random() < 0.3 and not cell.exchange.endswith("p2p")
    return replace(cell, sinks=draw.random() < 0.4, softcap=draw.choice((0.0, 0.0, 2.0)), keep_kv=keeps)


def uncovered_pairs(cases: list[Cell]) -> list[tuple[Any, Any]]:
    """Values of two columns that no cell has together, but for exchanges and what they can't have."""
    columns = [field.name for field in fields(Cell) if field.name not in ("kernel", "deterministic")]
    found: list[tuple[Any, Any]] = []
    for one, other in itertools.combinations(columns, 2):
        met = {(getattr(cell, one), getattr(cell, other)) for cell in cases}
        values = [{pair[side] for pair in met} for side in (0, 1)]
        found += [
            (a, b)
            for a, b in itertools.product(*values)
            if (a, b) not in met
            and not (one == "exchange" and other == "world_size" and b not in ranks_of(a))
            and not (one == "exchange" and other == "keep_kv" and a.endswith("p2p"))
        ]
    return found


def te_cells(name: str, kernel: str = "reference", exchanges: tuple[str, ...] = EXCHANGES) -> list[Cell]:
    """TransformerEngine's shapes x masks x padding on 2 ranks and a grid of 4; dtypes and exchanges take turns."""
    size = TE_SIZES[name]
    masks = (
        PackedMask(),
        PackedMask(causal=False),
        PackedMask(window=(size // 8, 0)),
        PackedMask(window=(size // 32, 0)),
        PackedMask(causal=False, window=(size // 8, size // 8)),
    )
    dtypes, turns = itertools.cycle((torch.bfloat16, torch.float16)), itertools.cycle(exchanges)
    return [
        Cell(exchange, "dual_chunk", mask, padding, heads, dims, next(dtypes), ranks, kernel=kernel)
        for (heads, dims), mask, padding in itertools.product(TE_SHAPES, masks, te_packs(name, size))
        for exchange in (next(turns), next(turns))
        for ranks in ((4,) if exchange.startswith("a2a+") else (2,))
    ]


def ranks_of(exchange: str) -> tuple[int, ...]:
    return (4,) if exchange.startswith("a2a+") else (2, 3, 4)


def _scattered(cell: Cell) -> int:
    """Ranks that heads are scattered over; 1: they are not."""
    return 1 if "a2a" not in cell.exchange else cell.world_size // (1 if cell.exchange == "a2a" else 2)


TE_HOLES: dict[str, Callable[[Cell], bool]] = {
    "fp32": lambda c: c.dtype == torch.float32,
    "windows under a ring": lambda c: c.exchange.endswith("p2p") and c.mask.window is not None,
    "a two-sided window over documents of unequal lengths": lambda c: not c.mask.causal and c.mask.window is not None,
    "qk and v head dims that differ, all_gather or a2a": lambda c: (
        c.dims[0] != c.dims[1] and ("a2a" in c.exchange or c.exchange == "all_gather")
    ),
    "fewer key/value heads than ranks, a2a": lambda c: c.heads[1] < _scattered(c),
    "heads that the ranks do not divide, a2a": lambda c: c.heads[0] % _scattered(c) != 0,
    "dual_chunk with lengths that 2 · ranks does not divide": lambda c: (
        c.layout == "dual_chunk" and c.padding == "none"
    ),
    "capacity beyond the last document": lambda c: c.padding in ("tail", "two rows"),
    "a ring's step without a key": lambda c: c.exchange.endswith("p2p") and c.padding == "empty ranks",
    "soft cap": lambda c: c.softcap > 0,
    "sinks in a ring or under all_gather": lambda c: c.sinks and c.exchange in ("p2p", "all_gather", "a2a+p2p"),
}
"""Cases that TransformerEngine's context parallelism raises on, leaves out or gets wrong: which cells here are such."""
