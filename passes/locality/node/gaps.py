"""What rows of tokens of no document hold in an op's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cp_rewrite.passes.locality.claims.tensor_state import Partial, Rows, TensorState

from .call import Call


def join_gaps(
    call: Call, new: Sequence[TensorState], again: Callable[[], Sequence[TensorState]]
) -> Sequence[TensorState]:
    """A rule's results with what rows of tokens of no document hold, for which the rule is asked `again`.

    labels != -100        gap 0
    logits                attended
    logits * that         gap 0: the same on one process, and in a sum
    logits.sum()          refused for batches that have such tokens
    """
    operands = [rows for x in call.tensors if (rows := call.rows(x))]
    attended = any(rows.attended for rows in operands)
    there = new
    if any(rows.pad != rows.gap for rows in operands) or (attended and any(isinstance(s, Partial) for s in new)):
        with call.facts.in_gaps() as events:
            there = again()
        call.facts.events.gaps |= attended and events.unmasked
    gaps = [state.pad if isinstance(state, Rows) else None for state in there]
    return [
        replace(state, gap=gap, attended=attended and gap is None) if isinstance(state, Rows) else state
        for state, gap in zip(new, gaps, strict=True)
    ]


def whole_of_gaps(call: Call, new: Sequence[TensorState]) -> Sequence[TensorState]:
    """Results over the tokens of all ranks: they take in what rows of tokens of no document hold, unless that is
    ignored, and no more is known of such rows."""
    operands = [rows for x in call.tensors if (rows := call.rows(x))]
    attended = any(rows.attended for rows in operands)
    target = call.rows(call.arg("target")) if call.name.startswith("nll_loss") else None
    ignored = target is not None and target.gap is not None and target.gap == call.arg("ignore_index")
    call.facts.events.gaps |= attended and not ignored and any(not isinstance(state, Rows) for state in new)
    return [Rows(s.dims, attended=attended) if isinstance(s, Rows) else s for s in new]
