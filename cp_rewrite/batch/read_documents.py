"""The shape of a batch and its documents, read on the host: these from its packing argument or from lengths.

shape_of           the shape that all token arguments share
documents_of       the documents of each row
unnamed_tokens     arguments that look like tokens, and that the annotation does not name
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cp_rewrite.arguments import named_values
from cp_rewrite.documents import MAX_ID, MAX_TOKENS, Documents, Nodes, SpanRuns
from cp_rewrite.packing import (
    CuSeqlens,
    DocumentIds,
    EndOfDocument,
    PaddingMask,
    PerToken,
    PositionIds,
    StartOfDocument,
    Tree,
    WholeRows,
    packing_args,
)
from cp_rewrite.sharding import Sharding

from .marks import batch_number


def shape_of(sharding: Sharding, batch: Mapping[str, Any]) -> tuple[int, int]:
    """(rows of the batch, tokens of each), which all arguments in `tokens` must share.

    Raises:
        KeyError, TypeError, ValueError: they do not; a name is missing, no tensor, or was cut before.
    """
    named_values("batch", batch)
    missing = [name for name in sharding.tokens if batch.get(name) is None]
    if missing:
        raise KeyError(f"tokens names {missing}, but the batch has no such tensor; it has {sorted(batch)}")
    for name, dim in sharding.tokens.items():
        if not isinstance(batch[name], Tensor):
            raise TypeError(f"batch[{name!r}] must be a tensor, got {type(batch[name]).__name__}")
        if batch_number(batch[name]) is not None:
            raise ValueError(f"batch[{name!r}] was cut before: shard() takes the global batch, once")
        if dim >= batch[name].ndim:
            raise ValueError(f"tokens[{name!r}] is dim {dim}, but batch[{name!r}] has shape {tuple(batch[name].shape)}")
    totals = {name: batch[name].shape[dim] for name, dim in sharding.tokens.items()}
    for name, dim in sharding.tokens.items():
        if set(totals.values()) == {1} and batch[name].shape[dim + 1 :].numel() > 1:
            raise ValueError(
                f"tokens[{name!r}] is dim {dim}, of which batch[{name!r}], of shape {tuple(batch[name].shape)}, has "
                f"one entry: its token dim is {dim + 1}, if these are rows of tokens"
            )
    if len(set(totals.values())) > 1:
        raise ValueError(f"token dims must have one length, got {totals}: check the dims in tokens")
    first, dim = next(iter(sharding.tokens.items()))
    rows = batch[first].shape[dim - 1] if dim else 1
    other = [n for n, d in sharding.tokens.items() if rows > 1 and (d == 0 or batch[n].shape[d - 1] != rows)]
    if other:
        shapes = {name: tuple(batch[name].shape) for name in other}
        raise ValueError(
            f"batch[{first!r}] has {rows} rows, but {shapes} differ: expand them to ({rows}, T), or check the dims in "
            "tokens"
        )
    total = next(iter(totals.values()))
    if not rows or not total:
        raise ValueError(f"the batch has {rows} rows of {total} tokens: nothing to cut")
    return rows, total


def documents_of(
    sharding: Sharding,
    batch: Mapping[str, Any],
    rows: int,
    total: int,
    lengths: Any = None,
    seams: Sequence[int] = (),
) -> list[Documents]:
    """Documents of each of the batch's `rows` rows of `total` tokens.

    Args:
        sharding: names the packing argument.
        batch: the global batch.
        lengths: (N,) or one list per row, to be taken instead; they are compared with the packing argument where that
            is on the host.
        seams: tokens at which the rows begin that were joined to the batch's one, but for the first.
    Raises:
        KeyError, TypeError, ValueError: no packing argument, values that are no packing, lengths that do not fit.
    """
    spans = _spans_of(sharding, batch, rows, total)
    found = _documents_of(sharding, batch, rows, total, lengths)
    return [replace(row, spans=each and each.split(seams)) for row, each in zip(found, spans, strict=True)]


def _documents_of(sharding: Sharding, batch: Mapping[str, Any], rows: int, total: int, lengths: Any) -> list[Documents]:
    if lengths is None:
        return _read(sharding, batch, rows, total)
    if isinstance(sharding.packing, Tree):
        raise ValueError("lengths tell documents apart, not the nodes of a tree: shard the batch on the host without")
    given = [Documents.from_lengths(row, total) for row in _rows_of(lengths, rows)]
    value: Any = batch.get(sharding.packing.arg)
    if isinstance(value, Tensor) and value.device.type == "cpu":
        whole = isinstance(sharding.packing, CuSeqlens | DocumentIds | PaddingMask)
        read = _read(sharding, batch, rows, total)
        _check_lengths(given, read, whole)
        return [replace(mine, before=theirs.before) for mine, theirs in zip(given, read, strict=True)]
    return given


def _rows_of(lengths: Any, rows: int) -> list[Any]:
    """One list of lengths per row."""
    if isinstance(lengths, Tensor):
        if lengths.device.type != "cpu":
            raise ValueError(f"lengths are on {lengths.device}: pass them on the host, as a list or a CPU tensor")
        lengths = np.atleast_1d(lengths.numpy())
    if not isinstance(lengths, Sequence | np.ndarray) or isinstance(lengths, str):
        raise TypeError(f"lengths must be a list of whole numbers, or one such list per row, got {lengths!r}")
    if not len(lengths):
        raise ValueError("lengths are empty: pass the lengths of all documents, or None to read the packing argument")
    nested = list(lengths) if np.ndim(lengths[0]) else [lengths]
    if len(nested) != rows:
        raise ValueError(f"lengths holds {len(nested)} rows, the batch {rows}: pass one list of lengths per row")
    return nested


def _check_lengths(given: Sequence[Documents], read: Sequence[Documents], whole: bool) -> None:
    """Raise where the documents that lengths give are not those that were read.

    `whole`: compare the whole row; else only up to the end of the lengths, since positions and tokens can't tell
    padding from documents.
    """
    for row, (mine, theirs) in enumerate(zip(given, read, strict=True)):
        used = mine.total if whole else int(mine.lengths.sum())
        said, found = _spans(mine, used), _spans(theirs, used)
        if said != found:
            raise ValueError(
                f"lengths say that row {row} has documents at {said[:8]}…, its packing argument says {found[:8]}…"
            )


def _spans(documents: Documents, used: int) -> list[tuple[int, int]]:
    """(start, stop) of each document that is not empty, of the row's first `used` tokens."""
    real = (documents.lengths > 0) & (documents.starts < used)
    stops = np.minimum(documents.ends, used)
    return list(zip(documents.starts[real].tolist(), stops[real].tolist(), strict=True))


def _read(sharding: Sharding, batch: Mapping[str, Any], rows: int, total: int) -> list[Documents]:
    """Documents of each row, by the packing argument."""
    packing = sharding.packing
    if isinstance(packing, WholeRows):
        return [Documents.from_lengths([total])] * rows
    values = _host_array(batch, packing.arg)
    if isinstance(packing, CuSeqlens):
        if rows > 1:
            raise ValueError(
                f"cu_seqlens pack one row, but the batch has {rows}: make them one, or use another packing"
            )
        padded = None if packing.padded_arg is None else _host_array(batch, packing.padded_arg)
        return [Documents.from_cu_seqlens(values, total, padded)]
    table = _per_token(sharding, packing.arg, values, rows, total)
    if not isinstance(packing, Tree):
        return [_read_row(packing, row) for row in table]
    if packing.parents is not None:
        parents = _parents(batch, packing.parents, rows)
        return [_read_parents(row, above) for row, above in zip(table, parents, strict=True)]
    second = packing.completion or packing.tin
    if second is None:
        return [_read_ranges(np.where(row < 0, -1, np.arange(total)), row) for row in table]
    others = _per_token(sharding, second, _host_array(batch, second), rows, total)
    read = _read_ranges if packing.completion is None else _read_completions
    pairs = zip(others, table, strict=True) if packing.completion is None else zip(table, others, strict=True)
    return [read(*pair) for pair in pairs]


def _per_token(sharding: Sharding, name: str, values: NDArray[Any], rows: int, total: int) -> NDArray[Any]:
    """(rows, total) of an argument that has one value per token; of positions in planes, the first plane."""
    dim = sharding.tokens[name]
    if isinstance(sharding.packing, PositionIds) and name == sharding.packing.arg and dim > 1:
        values = text_positions(values, dim)
        dim = 1
    table = np.moveaxis(values, dim, -1).reshape(-1, total)
    if len(table) != rows:
        raise ValueError(
            f"batch[{name!r}] has shape {values.shape}, not {rows} rows of {total} tokens: tokens says that its token "
            f"dim is {dim}"
        )
    packing = sharding.packing
    # What is proven of masks holds up to these.
    if name not in packing_args(packing) or isinstance(packing, PositionIds | Tree):
        most = MAX_ID if isinstance(packing, Tree) and name == packing.arg else MAX_TOKENS
        if table.size and max(int(table.max()), -int(table.min())) > most:
            raise ValueError(f"batch[{name!r}] goes up to {table.max()}, but may go up to {most}: number it anew")
    return table


def text_positions(values: Any, dim: int) -> Any:
    """(rows, tokens) positions inside of documents, of positions with tokens at `dim`: of several planes (mRoPE's 4:
    text, time, height, width) those of the first."""
    for _ in range(dim - 1):
        values = values[0]
    return values


def _read_completions(prompts: NDArray[Any], completions: NDArray[Any]) -> Documents:
    """Documents of one row: prompts with their completions."""
    return replace(Documents.from_document_ids(prompts), nodes=Nodes.from_completions(prompts, completions))


def _parents(batch: Mapping[str, Any], name: str, rows: int) -> NDArray[Any]:
    """(rows, nodes) parents of a batch's nodes."""
    value = _host_array(batch, name)
    table = np.atleast_2d(value)
    if table.ndim != 2 or len(table) not in (1, rows) or table.shape[1] > MAX_TOKENS:
        raise ValueError(f"batch[{name!r}] has shape {value.shape}, not (nodes,) or ({rows}, nodes)")
    return np.broadcast_to(table, (rows, table.shape[1]))


def _read_parents(segments: NDArray[Any], parents: NDArray[Any]) -> Documents:
    """Documents of one row: trees by the parents of their nodes."""
    return _trees(Nodes.from_parents(segments, parents), segments.size)


def _read_ranges(tin: NDArray[Any], tout: NDArray[Any]) -> Documents:
    """Documents of one row: trees by the ranges of their nodes."""
    return _trees(Nodes.from_ranges(tin, tout), tin.size)


def _trees(nodes: Nodes, total: int) -> Documents:
    """Documents of one row: trees, one behind another."""
    roots = np.flatnonzero(nodes.parents < 0)
    last = np.append(roots[1:], len(nodes.starts))[: len(roots)] - 1
    starts, lengths = nodes.starts[roots], nodes.ends[last] - nodes.starts[roots]
    if int(lengths.sum()) != int((nodes.ends - nodes.starts).sum()):
        raise ValueError("padding (negative numbers) stands inside of a tree: put it behind")
    node, above = nodes.ancestors
    apart = np.flatnonzero(above < roots[np.searchsorted(roots, node, side="right") - 1])
    if apart.size:
        raise ValueError(f"the node at token {nodes.starts[node[apart[0]]]} stands behind another tree than its own")
    return Documents(starts, lengths, total, nodes=nodes)


def _spans_of(sharding: Sharding, batch: Mapping[str, Any], rows: int, total: int) -> Sequence[SpanRuns | None]:
    """The spans of each row, where the annotation names them."""
    spans = sharding.spans
    if spans is None:
        return [None] * rows
    table = _per_token(sharding, spans.arg, _host_array(batch, spans.arg), rows, total)
    if spans.value is None:
        return [SpanRuns.of_ids(row, spans.none) for row in table]
    return [SpanRuns.of_value(row, spans.values, spans.prefix) for row in table]


def _read_row(packing: PerToken, row: NDArray[Any]) -> Documents:
    """Documents of one row, by what its (T,) tokens say."""
    try:
        return _documents_in(packing, row)
    except ValueError as error:
        raise ValueError(f"batch[{packing.arg!r}]: {error}") from None


def _documents_in(packing: PerToken, row: NDArray[Any]) -> Documents:
    match packing:
        case PositionIds():
            return Documents.from_position_ids(row)
        case DocumentIds():
            return Documents.from_document_ids(row, packing.padding)
        case EndOfDocument():
            return Documents.from_end_tokens(row, packing.token_id)
        case StartOfDocument():
            return Documents.from_start_tokens(row, packing.token_id)
        case PaddingMask():
            return Documents.from_padding_mask(row)


def _host_array(batch: Mapping[str, Any], name: str) -> NDArray[Any]:
    """An argument that tells documents apart, as an array."""
    value = batch.get(name)
    if value is None:
        raise KeyError(f"packing reads {name!r}, which the batch lacks; it has {sorted(batch)}; or pass lengths=")
    if isinstance(value, Tensor) and value.device.type != "cpu":
        raise ValueError(
            f"batch[{name!r}] is on {value.device}, and reading documents there would stall it: "
            "shard the batch before moving it, or pass lengths="
        )
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        raise TypeError(f"batch[{name!r}] tells documents apart, so it must hold whole numbers, got {value.dtype}")
    return np.asarray(value)


def unnamed_tokens(batch: Mapping[str, Any], tokens: Mapping[str, int], total: int) -> list[str]:
    """A line for each tensor of a batch that has `total` tokens in a dim that `tokens` does not name."""
    found: list[str] = []
    for name, value in batch.items():
        dims = [dim for dim, size in enumerate(value.shape) if size == total] if isinstance(value, Tensor) else []
        if total < 2 or not dims or dims == [tokens.get(name)]:
            continue
        where = f"dim{'s' * (len(dims) > 1)} {' and '.join(map(str, dims))}"
        said = (
            f"tokens says {tokens[name]}" if name in tokens else "tokens does not name it, so each rank gets it whole"
        )
        found.append(f"batch[{name!r}] has as many entries as the row has tokens, {total}, in {where}, and {said}")
    return found
