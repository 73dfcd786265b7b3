"""The rule of ops that the user vouches for (`Sharding.local_ops`): they act on each token alone."""

from __future__ import annotations

from torch import Tensor

from cp_rewrite.passes.locality.claims.dims import Mixes
from cp_rewrite.passes.locality.claims.tensor_state import Rows, TensorState
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.torch_internals import OpOverload


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
