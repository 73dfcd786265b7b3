"""What the annotation says of a graph's inputs: how long the axes are, and where each input has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch.fx as fx
from torch import Tensor

from cp_rewrite.arguments import IGNORE_INDEX, LABELS
from cp_rewrite.packing import CuSeqlens, DocumentIds, PaddingMask
from cp_rewrite.passes.graph.dynamo_internals import is_random_number
from cp_rewrite.passes.graph.tokens import TokenAxis, TokenInput
from cp_rewrite.passes.locality.claims.dims import B, Dim, T
from cp_rewrite.passes.locality.claims.extents import Extents
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED, UNKNOWN, AtMost, Number, Rows, TensorState
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.sharding import Sharding


def read_extents(tokens: TokenAxis, shape_env: Any) -> Extents | None:
    """Sizes of the token and batch axes; None where no input tells them."""
    if not tokens.inputs or tokens.is_single:
        return None
    plain = Extents(0, 0, shape_env=shape_env)
    return Extents(plain.size(tokens.inputs[0].tokens), plain.size(tokens.rows), shape_env)


def input_state(
    node: fx.Node, tokens: TokenAxis, sharding: Sharding, extents: Extents
) -> tuple[TensorState, Refusal | None]:
    """What is known of one placeholder."""
    value, name = node.meta.get("example_value"), tokens.names.get(node)
    if not isinstance(value, Tensor):
        return REPLICATED, None
    if is_random_number(node):
        detail = "Python's random draws another number on each rank: draw it before, and pass it to the model"
        return UNKNOWN, Refusal(Reason.DROPOUT, detail, node)
    if any(refusal.node is node for refusal in tokens.refusals):
        return UNKNOWN, None
    if node in tokens.masks:
        detail = f"{tokens.masks[node].name!r} is a mask, which no rank has, and something else than attention reads it"
        return UNKNOWN, Refusal(Reason.TOKEN_INPUT, detail, node)
    found = tokens.input(node)
    if found is not None:
        return _token_rows(found, extents, sharding), None
    packing = sharding.packing
    if isinstance(packing, CuSeqlens) and name in (packing.arg, packing.padded_arg):
        return REPLICATED, None
    if any(map(extents.counts_tokens, value.shape)):
        called = name or node.name
        detail = (
            f"{called} has a dim as long as the tokens but is not named in tokens; add {called!r} and its token dim"
        )
        return UNKNOWN, Refusal(Reason.TOKEN_INPUT, detail, node)
    return REPLICATED, None


def _token_rows(found: TokenInput, extents: Extents, sharding: Sharding) -> Rows:
    """Rows of an argument that `shard` cuts, or of a block's, which is computed."""
    cut = found.name in sharding.tokens or found.name not in sharding.block_tokens
    dims: list[Dim] = [None] * found.value.ndim
    dims[found.dim] = (T,)
    if found.dim and extents.batch != 1:
        dims[found.dim - 1] = (B,)
    label = found.name in LABELS and not found.value.is_floating_point()
    # A named argument that needs a gradient was computed too.
    attended, padding = not cut or found.value.requires_grad, _padding(found, sharding) if cut else None
    return Rows(tuple(dims), fill=IGNORE_INDEX if label else None, padding=padding, attended=attended)


def _padding(found: TokenInput, sharding: Sharding) -> Number | None:
    """What an argument holds at tokens of no document: `shard` sees to it that none is a target."""
    if found.name in LABELS and not found.value.is_floating_point():
        return IGNORE_INDEX
    packing = sharding.packing
    if isinstance(packing, DocumentIds) and found.name == packing.arg:
        return AtMost(packing.padding)
    if isinstance(packing, PaddingMask) and found.name == packing.arg:
        return 0
    return None


def why_static(extents: Extents, fixed: Sequence[str]) -> Refusal:
    """What made a constant of the token count: inputs of that size, or a line of the model, where a guard names one."""
    if fixed:
        detail = (
            f"{', '.join(fixed)} came with a fixed number of tokens, {extents.tokens}: pass what `shard` returns, not "
            "copies; or mark the token dims (torch._dynamo.maybe_mark_dynamic), or compile with dynamic=True"
        )
        return Refusal(Reason.TOKEN_INPUT, detail)
    for guard in getattr(extents.shape_env, "guards", ()):
        if _fixes(guard.expr, extents.tokens):
            line = str(guard.sloc)
            why = "as a loop over a range of tokens does (cut them by `split`), or a chunk of one token"
            if "opt_einsum" in line:
                why = "since opt_einsum takes an order by sizes: set torch.backends.opt_einsum.enabled = False"
            elif "math." in line:
                why = "as functions of math do but sqrt: math.log(T) is torch.ones(T).sum().log()"
            detail = f"`{line}` fixes the number of tokens to the shard's {extents.tokens}, {why}"
            return Refusal(Reason.TOKEN_COUNT, detail)
    return Refusal(Reason.TOKEN_INPUT, f"the graph was captured for {extents.tokens} tokens a rank only")


def _fixes(condition: Any, tokens: Any) -> bool:
    """Whether a condition is S = tokens, or says so in other words, as S - 12 = 1."""
    if not isinstance(condition, sympy.Eq):
        return False
    difference = sympy.expand(condition.args[0] - condition.args[1])  # pyright: ignore[reportOperatorIssue]
    symbols = [*difference.free_symbols]
    alone = len(symbols) == 1 and difference.is_polynomial(*symbols) and sympy.degree(difference, symbols[0]) == 1
    return tokens in condition.args or (alone and difference.subs({symbols[0]: tokens}) == 0)
