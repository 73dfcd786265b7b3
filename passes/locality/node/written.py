"""What is known of tensors after an op wrote into memory that they share."""

from __future__ import annotations

from torch import Tensor

from cp_rewrite.passes.locality.claims.dims import Mixes
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED, UNKNOWN, Rows, TensorState
from cp_rewrite.torch_internals import memory_id

from .call import Call


def join_written(call: Call) -> TensorState:
    """State of the tensors that an op which returns nothing writes into."""
    states = {call.state(other) for other in call.tensors}
    return REPLICATED if states <= {REPLICATED} else UNKNOWN


def written_state(
    target: Tensor, before: TensorState, new: TensorState, other: Tensor, state: TensorState
) -> TensorState:
    """State of `other`, which shares memory with `target`, after `target` got the state `new`.

    Args:
        before: the state of `target` so far. state: that of `other`.
    Raises:
        Mixes: `other` may hold token rows now in a way that its dims do not tell.
    """
    same = other is target or (
        other.shape == target.shape
        and other.stride() == target.stride()
        and other.storage_offset() == target.storage_offset()
    )
    if same or UNKNOWN in (new, state):
        return new if same else UNKNOWN
    if isinstance(new, Rows) and isinstance(before, Rows) and isinstance(state, Rows) and new.dims == before.dims:
        return Rows(state.dims, attended=new.attended or state.attended)
    if new == before == REPLICATED:
        return state
    raise Mixes("writes token rows through a view into a tensor that is not cut like them")


def shares_memory(a: Tensor, b: Tensor) -> bool:
    return a is b or memory_id(a) == memory_id(b)
