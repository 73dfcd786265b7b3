"""How a batch tells its documents apart: which of its arguments says so, and in what form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .arguments import whole_number
from .documents import MAX_ID


@dataclass(frozen=True)
class CuSeqlens:
    """Documents given by the running sum of their lengths, (N + 1,) integers from 0, in argument `arg`.

    The argument is handed over whole, not cut; the batch has one row. `padded_arg` names the (N + 1,) tokens at which
    documents really start, and the row ends, where padding stands between them.
    """

    arg: str
    padded_arg: str | None = None


@dataclass(frozen=True)
class PositionIds:
    """Documents given by positions, (B, T) or (T,) integers 0, 1, 2, … within each document, in argument `arg`."""

    arg: str


@dataclass(frozen=True)
class DocumentIds:
    """Documents given by one id per token, (B, T) or (T,) integers, in argument `arg`.

    The tokens of a document stand side by side. Ids up to `padding` are padding: negative ones, or with `padding=0`
    zero too, as where documents count from 1.
    """

    arg: str
    padding: int = -1


@dataclass(frozen=True)
class EndOfDocument:
    """Documents end at tokens `token_id` of argument `arg`, (B, T) or (T,) integers; the row's end ends its last.

    Two such tokens side by side make a document of one token.
    """

    arg: str
    token_id: int


@dataclass(frozen=True)
class StartOfDocument:
    """Documents start at tokens `token_id` of argument `arg`, (B, T) or (T,) integers, and at the row's start."""

    arg: str
    token_id: int


PerToken = PositionIds | DocumentIds | EndOfDocument | StartOfDocument
Packing = CuSeqlens | PerToken


def packing_args(packing: Packing) -> tuple[str, ...]:
    """Names of the arguments that tell documents apart."""
    padded = packing.padded_arg if isinstance(packing, CuSeqlens) else None
    return (packing.arg,) if padded is None else (packing.arg, padded)


def check_packing(packing: Any, tokens: Mapping[str, int]) -> None:
    """Raise a TypeError or ValueError unless `packing` is one, and goes with the arguments that are cut."""
    if not isinstance(packing, Packing):
        raise TypeError(
            "packing must be CuSeqlens(arg), PositionIds(arg), DocumentIds(arg), EndOfDocument(arg, token_id) or "
            f"StartOfDocument(arg, token_id), got {packing!r}"
        )
    args = packing_args(packing)
    if not all(isinstance(arg, str) for arg in args):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"packing must name an argument, as in PositionIds('position_ids'), got {packing!r}")
    if isinstance(packing, DocumentIds) and whole_number("padding", packing.padding, -MAX_ID) > 0:
        raise ValueError(f"padding must be 0 or less, got {packing.padding}: ids up to it are padding")
    if isinstance(packing, EndOfDocument | StartOfDocument):
        whole_number("token_id", packing.token_id, 0)
    if isinstance(packing, CuSeqlens):
        sharded = sorted(set(args) & set(tokens))
        if sharded:
            raise ValueError(f"tokens names {sharded}, but cu_seqlens are global and are not sharded")
    elif packing.arg not in tokens:
        raise ValueError(f"packing reads {packing.arg!r}, which has one value per token: name it in tokens too")
