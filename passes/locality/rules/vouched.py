"""What goes by the user's word: ops that act on each token alone (`Sharding.local_ops`), and random numbers that each
rank draws for its own tokens (`Sharding.random`).

A draw for every token, as dropout makes it, is as good from any generator. One that all tokens share (dropout on a
weight, noise per expert) must be the same on all ranks, and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.nodes import value_of
from cp_rewrite.passes.locality.claims.dims import Mixes
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED, Rows, TensorState
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.refusal import Reason
from cp_rewrite.torch_internals import OpOverload, OpOverloadPacket

from .rule import States


def vouched_name(func: OpOverload) -> str:
    """The name a user vouches for an op by: `ns::op`."""
    return func._schema.name


def vouched_state(call: Call, out: Tensor) -> TensorState:
    """Token dim of a result: that of an input whose token and batch dims it has, or else the one dim of T entries."""
    sizes = call.sizes(out)
    inputs = [tensor for tensor in call.tensors if call.rows(tensor)]
    for tensor in inputs:
        entries = call.entries(tensor)
        if all(dim is None or (i < len(sizes) and sizes[i] == size) for i, (dim, size) in enumerate(entries)):
            dims = [dim for dim, _ in entries[: len(sizes)]]
            return Rows((*dims, *[None] * (len(sizes) - len(dims))))
    if inputs and (dims := call.extents.label(sizes)) is not None:
        return Rows(dims)
    raise Mixes(f"{vouched_name(call.func)} is vouched for, but its result of shape {tuple(sizes)} has no token dim")


def vouched_calls(
    nodes: Sequence[fx.Node], states: Mapping[fx.Node, Any], names: Sequence[str]
) -> dict[str, list[int | None]]:
    """The token dims of the tensors that the first call of each op is given: token rows, and what all ranks have."""
    found: dict[str, list[int | None]] = {}
    for node in nodes:
        name = _called(node.target)
        if name not in names or name in found:
            continue
        given: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), given.append)
        operands = [states.get(n) for n in given if isinstance(value_of(n), Tensor)]
        if all(isinstance(state, Rows) or state is REPLICATED for state in operands):
            found[name] = [state.token_dim if isinstance(state, Rows) else None for state in operands]
    return {name: dims for name, dims in found.items() if any(dim is not None for dim in dims)}


def _called(target: Any) -> str:
    """The name of an op, `ns::op`; "" of what is none."""
    if isinstance(target, OpOverloadPacket):
        return target._qualified_op_name
    return vouched_name(target) if isinstance(target, OpOverload) else ""


_OF_SIZES = frozenset({"rand", "randn", "randint"})
_PER_ENTRY = frozenset(
    {"native_dropout", "bernoulli", "rand_like", "randn_like", "randint_like", "uniform", "normal", "exponential"}
    | {"random", "geometric", "cauchy", "log_normal", "poisson", "normal_functional", "rrelu_with_noise"}
)


def drawn(call: Call) -> States:
    """Of sizes that count tokens, or of rows, entry by entry: rows. multinomial: of ordinary dims."""
    if call.name in _OF_SIZES:
        dims = call.extents.label(call.sizes(call.outs[0]))
        if dims is not None:
            return Rows(dims)
    tensors = [x for x in call.tensors if call.rows(x)]
    shared = [x for x in call.tensors if call.state(x) is not REPLICATED and not call.rows(x)]
    if tensors and not shared and (call.name in _PER_ENTRY or call.name == "multinomial"):
        call.use_positions(*tensors)
        rows = call.rows(tensors[0])
        assert rows is not None
        if call.name == "multinomial":
            call.refuse_axis(rows, call.first.ndim - 1, "draws from")
        if any(call.rows(x) is None or call.entries(x) != call.entries(tensors[0]) for x in call.tensors):
            raise Mixes(f"{call.name} draws for token rows by something that is not cut like them", Reason.DROPOUT)
        return Rows(rows.dims, attended=any(r.attended for x in tensors if (r := call.rows(x))))
    raise Mixes(
        f"{call.name} draws random numbers that all ranks share, which differ between them: draw them outside of the "
        "model, and pass them in",
        Reason.DROPOUT,
    )
