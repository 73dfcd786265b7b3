"""What padding, tokens of no document, holds in an op's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cp_rewrite.passes.locality.claims.tensor_state import Partial, Rows, TensorState

from .call import Call


def with_padding(
    call: Call, new: Sequence[TensorState], again: Callable[[Call], Sequence[TensorState]]
) -> Sequence[TensorState]:
    """A rule's results with what padding holds in them, for which the rule is asked `again`, as if it were fill.

    labels != -100        padding 0
    logits                attended
    logits * that         padding 0: the same on one process, and in a sum
    logits.sum()          refused for batches that have such tokens
    """
    operands = [rows for x in call.tensors if (rows := call.rows(x))]
    attended = any(rows.attended for rows in operands)
    there = new
    if any(rows.fill != rows.padding for rows in operands) or (attended and any(isinstance(s, Partial) for s in new)):
        padded = call.reading(
            {id(x): replace(rows, fill=rows.padding) if (rows := call.rows(x)) else call.state(x) for x in call.tensors}
        )
        there = again(padded)
        call.events.sums_padding |= attended and padded.events.sums_fill
    paddings = [state.fill if isinstance(state, Rows) else None for state in there]
    return [
        replace(state, padding=value, attended=attended and value is None) if isinstance(state, Rows) else state
        for state, value in zip(new, paddings, strict=True)
    ]


def whole_with_padding(call: Call, new: Sequence[TensorState]) -> Sequence[TensorState]:
    """Results over the tokens of all ranks: they take in what padding holds, unless that is ignored, and no more is
    known of it."""
    operands = [rows for x in call.tensors if (rows := call.rows(x))]
    attended = any(rows.attended for rows in operands)
    target = call.rows(call.arg("target")) if call.name.startswith("nll_loss") else None
    ignored = target is not None and target.padding is not None and target.padding == call.arg("ignore_index")
    call.events.sums_padding |= attended and not ignored and any(not isinstance(state, Rows) for state in new)
    return [Rows(s.dims, attended=attended) if isinstance(s, Rows) else s for s in new]
