"""How a batch tells its documents apart: which of its arguments says so, and in what form."""

from __future__ import annotations

import inspect
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
    """Documents given by positions, (B, T) or (T,) integers 0, 1, 2, … within each document, in argument `arg`.

    A row may begin inside of a document, at a higher position.
    """

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


@dataclass(frozen=True)
class PaddingMask:
    """Each row is one document, whose tokens argument `arg`, (B, T) or (T,) of 0 and 1, marks by 1. Padding, 0, stands
    behind it or before it."""

    arg: str


@dataclass(frozen=True)
class WholeRows:
    """Each row is one document, and no argument says more: for models that attend over whole rows."""

    @property
    def arg(self) -> str:
        """The name of no argument."""
        return ""


@dataclass(frozen=True)
class Tree:
    """Rows of trees: tokens that share what stands before them, as completions do their prompt. (B, T) or (T,) integers
    in all arguments; negative ones are padding.

        Tree("prompt_ids", completion="completion_ids")     one prompt id on a prompt and all of its completions;
                                                            completion 0 on the prompt, 1, 2, … behind it
        Tree("tout", tin="tin")                             of each token's node the range [tin, tout) of numbers that
                                                            it and its descendants have, in depth-first order
        Tree("tout")                                        the same, numbers being tokens' places in the row: tout is
                                                            the place behind the node's last descendant
        Tree("segment_ids", parents="parents")              the number of each token's node, and of each node, (N,) or
                                                            (B, N), its parent's, which is handed over whole; a root
                                                            is its own parent
    """

    arg: str
    tin: str | None = None
    completion: str | None = None
    parents: str | None = None


PerToken = PositionIds | DocumentIds | EndOfDocument | StartOfDocument | PaddingMask
Packing = CuSeqlens | PerToken | Tree | WholeRows


@dataclass(frozen=True)
class Spans:
    """Tokens that see each other in both directions where a mask says so, by argument `arg`, (B, T) or (T,) integers.

    Spans("span_ids")                      tokens of one id are a span; ids up to `none` are of no span
    Spans("token_type_ids", value=1)       tokens side by side that hold 1 are a span, as of an image
    Spans("mm_token_type_ids", value=(1, 2))   the same of those that hold 1 or 2: of images and videos (Gemma 4)
    Spans("token_type_ids", value=0, prefix=True)   those that hold 0 are the first ones of their document
    """

    arg: str
    value: int | tuple[int, ...] | None = None
    none: int = 0
    prefix: bool = False

    @property
    def values(self) -> tuple[int, ...]:
        """Numbers that tokens of spans hold; none where spans have ids."""
        return self.value if isinstance(self.value, tuple) else () if self.value is None else (self.value,)


def packing_args(packing: Packing) -> tuple[str, ...]:
    """Names of the arguments that tell documents apart."""
    match packing:
        case CuSeqlens(arg, padded):
            others = (padded,)
        case Tree(arg, tin, completion, parents):
            others = (tin, completion, parents)
        case WholeRows():
            return ()
        case _:
            arg, others = packing.arg, ()
    return (arg, *(other for other in others if other is not None))


def whole_args(packing: Packing) -> tuple[str, ...]:
    """Arguments that are handed over whole; others have one value per token."""
    if isinstance(packing, Tree):
        return () if packing.parents is None else (packing.parents,)
    return packing_args(packing) if isinstance(packing, CuSeqlens) else ()


def untaken_args(target: Any, packing: Packing, given: Mapping[str, Any]) -> list[str]:
    """Arguments that tell documents apart and are given, but that a function, or a module's forward, does not take."""
    try:
        parameters = inspect.signature(getattr(target, "forward", target)).parameters
    except (TypeError, ValueError):  # of builtins
        return []
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    return [name for name in packing_args(packing) if name not in parameters and name in given]


def check_packing(packing: Any, tokens: Mapping[str, int]) -> None:
    """Raise a TypeError or ValueError unless `packing` is one, and goes with the arguments that are cut."""
    if not isinstance(packing, Packing):
        raise TypeError(
            "packing must be CuSeqlens(arg), PositionIds(arg), DocumentIds(arg), EndOfDocument(arg, token_id), "
            f"StartOfDocument(arg, token_id), Tree(arg, ...), PaddingMask(arg) or WholeRows(), got {packing!r}"
        )
    args = packing_args(packing)
    if not all(isinstance(arg, str) for arg in args):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"packing must name an argument, as in PositionIds('position_ids'), got {packing!r}")
    if isinstance(packing, DocumentIds) and whole_number("padding", packing.padding, -MAX_ID) > 0:
        raise ValueError(f"padding must be 0 or less, got {packing.padding}: ids up to it are padding")
    if isinstance(packing, EndOfDocument | StartOfDocument):
        whole_number("token_id", packing.token_id, 0)
    if isinstance(packing, Tree) and [packing.tin, packing.completion, packing.parents].count(None) < 2:
        raise ValueError("a Tree has one of tin, completion and parents")
    whole = whole_args(packing)
    sharded = sorted(set(whole) & set(tokens))
    if sharded:
        what = "cu_seqlens" if isinstance(packing, CuSeqlens) else "parents of nodes"
        raise ValueError(f"tokens names {sharded}, but {what} are global and are not sharded")
    for arg in args:
        if arg not in whole and arg not in tokens:
            raise ValueError(f"packing reads {arg!r}, which has one value per token: name it in tokens too")


def check_spans(spans: Any, tokens: Mapping[str, int]) -> None:
    """Raise a TypeError or ValueError unless `spans` are None or Spans, and go with the arguments that are cut."""
    if spans is None:
        return
    if not isinstance(spans, Spans) or not isinstance(spans.arg, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"spans must be a cp_rewrite.Spans, as in Spans('span_ids'), or None, got {spans!r}")
    for value in spans.values:
        whole_number("the value of Spans", value, -MAX_ID)
    if spans.value == ():
        raise ValueError("Spans of values have one at least")
    whole_number("none of Spans", spans.none, -MAX_ID)
    if spans.prefix and spans.value is None:
        raise ValueError("Spans of prefixes have a value, which the tokens of a prefix hold")
    if spans.arg not in tokens:
        raise ValueError(f"spans read {spans.arg!r}, which has one value per token: name it in tokens too")
