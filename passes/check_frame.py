"""Refuse graphs that are parts of a function: nothing is known of what runs between them."""

from __future__ import annotations

from dataclasses import replace

from cp_rewrite.passes.values.state import State
from cp_rewrite.refusal import Reason, Refusal


def check_frame(state: State) -> State:
    """A graph must begin and end where the compiled function does.

    What Python computes at a graph break, from tokens perhaps, comes back as a tensor that looks like any argument, or
    as a number that Dynamo takes for a constant.
    """
    if state.sharding.world_size == 1:
        return state
    found: list[Refusal] = []
    if state.frame.breaks is not None:
        found.append(Refusal(Reason.GRAPH_BREAK, f"the graph ends at {state.frame.breaks}"))
    if state.frame.resumed:
        found.append(Refusal(Reason.GRAPH_BREAK, "the graph begins after a graph break"))
    return replace(state, refusals=(*state.refusals, *found))
