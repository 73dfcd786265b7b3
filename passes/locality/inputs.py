"""What the annotation says of a graph's inputs: which carry tokens, and how long the axes are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx
from torch import SymInt, Tensor

from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.sharding import CuSeqlens, Sharding

from .state import REPLICATED, UNKNOWN, B, Dim, Extents, Rows, Size, T, TensorState

IGNORE_INDEX = -100
LABELS = frozenset({"labels", "shift_labels"})
"""Arguments that a sharded batch fills with IGNORE_INDEX where a rank has no token; others are filled with 0."""


def token_dims(sharding: Sharding) -> dict[str, int]:
    """Argument -> token dim. A batch cut with `shift_labels=True` also carries `shift_labels`, like `labels`."""
    dims = {**sharding.tokens, **sharding.block_tokens}
    if "labels" in dims:
        dims.setdefault("shift_labels", dims["labels"])
    return dims


def read_extents(
    inputs: Mapping[fx.Node, str], sharding: Sharding, shape_env: Any
) -> tuple[Extents | None, list[Refusal]]:
    """Sizes of the token and batch axes, from the annotated inputs; a refusal for each that does not fit."""
    refusals: list[Refusal] = []
    tokens: dict[fx.Node, Any] = {}
    batches: dict[fx.Node, Any] = {}
    plain = Extents(0, 0, shape_env=shape_env)
    dims = token_dims(sharding)
    for node, name in inputs.items():
        value = node.meta["example_value"]
        if name not in dims or not isinstance(value, Tensor):
            continue
        if dims[name] >= value.ndim:
            detail = f"tokens[{name!r}] is dim {dims[name]}, but {name} has shape {tuple(value.shape)}"
            refusals.append(Refusal(Reason.TOKEN_INPUT, detail, node))
            continue
        tokens[node] = plain.size(value.shape[dims[name]])
        batches[node] = plain.size(value.shape[dims[name] - 1]) if dims[name] else 1
    if not tokens:
        detail = f"none of the arguments named in tokens ({', '.join(dims)}) reaches the graph"
        return None, [*refusals, Refusal(Reason.TOKEN_INPUT, detail)]
    count, batch = next(iter(tokens.values())), next(iter(batches.values()))
    if all(size == 1 for size in tokens.values()):
        detail = "a rank has 1 token, which torch compiles as a fixed size: give ranks more, as by pad_to_multiple=2"
        return None, [*refusals, Refusal(Reason.TOKEN_INPUT, detail)]
    for node, size in tokens.items():
        if size == 1 or (size != count and (isinstance(size, int) or isinstance(count, int))):
            detail = f"{inputs[node]} has {size} tokens a rank, others have {count}"
            refusals.append(Refusal(Reason.TOKEN_INPUT, detail, node))
    for node, size in batches.items():
        if size != batch:
            detail = f"{inputs[node]} has {size} rows of tokens, others have {batch}: expand it before it is cut"
            refusals.append(Refusal(Reason.TOKEN_INPUT, detail, node))
    aliases = tuple({size for size in tokens.values() if not isinstance(size, int) and size != count})
    return Extents(count, batch, aliases, shape_env), refusals


def token_sizes(inputs: Mapping[fx.Node, str], sharding: Sharding) -> list[tuple[str, int | SymInt]]:
    """(argument, its number of tokens in the graph) of the inputs that have the annotated dim."""
    dims = token_dims(sharding)
    values = [(name, node.meta["example_value"]) for node, name in inputs.items() if name in dims]
    return [(name, x.shape[dims[name]]) for name, x in values if isinstance(x, Tensor) and dims[name] < x.ndim]


def input_state(
    node: fx.Node, inputs: Mapping[fx.Node, str], sharding: Sharding, extents: Extents
) -> tuple[TensorState, Refusal | None]:
    """What is known of one placeholder."""
    value, name = node.meta.get("example_value"), inputs.get(node)
    if not isinstance(value, Tensor):
        return REPLICATED, None
    dims = token_dims(sharding)
    if name in dims and dims[name] < value.ndim:
        return _token_rows(value, name, dims[name], extents, name in sharding.tokens), None
    sizes = [extents.size(size) for size in value.shape]
    packing = sharding.packing
    metadata = isinstance(packing, CuSeqlens) and name in (packing.arg, packing.padded_arg)
    if metadata or (extents.static and (name is None or isinstance(value, torch.nn.Parameter))):
        return REPLICATED, None
    if any(_made_of(size, extents.tokens) for size in sizes):
        called = name or node.name
        detail = (
            f"{called} has a dim as long as the tokens but is not named in tokens; add {called!r} and its token dim"
        )
        return UNKNOWN, Refusal(Reason.TOKEN_INPUT, detail, node)
    return REPLICATED, None


def _token_rows(value: Tensor, name: str | None, dim: int, extents: Extents, cut: bool) -> Rows:
    dims: list[Dim] = [None] * value.ndim
    dims[dim] = (T,)
    if dim and extents.batch != 1:
        dims[dim - 1] = (B,)
    if name in LABELS:
        return Rows(tuple(dims), pad=IGNORE_INDEX)
    # Integers may be labels under another name, filled with something else than 0; a block's arguments are computed.
    known = cut and (value.dtype == torch.bool or value.is_floating_point())
    return Rows(tuple(dims), pad=0 if known else None)


def _made_of(size: Size, tokens: Size) -> bool:
    return size == tokens if isinstance(size, int) else tokens in size.free_symbols
