"""Recurrences over tokens: gated delta rules, SSD and selective scans, as the whole ops of `cp_rewrite/ops/states/`.

In the place of a whole op stands the one that runs on a rank's pieces: each piece's effect on the state, its summary,
goes to the ranks that have later pieces of the sequence.

    y = gated_delta_rule(q, k, v, g, beta, None, …)   ->   y = gated_delta_rule_on_pieces(q, k, v, g, beta, tables, …)

Without offsets the sequence is a row of the batch, over the ends of its documents: what one process computes. With the
packing's own offsets, or with `Sharding(reset_states=True)`, each document is one. Rows that hold no token give 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.ops.states.kinds import state_shapes, wide
from cp_rewrite.passes.graph.nodes import schema_of
from cp_rewrite.passes.locality.claims.dims import B, Mixes, T
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED, Rows
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.passes.locality.rules.rule import States as Claims
from cp_rewrite.passes.values.resolution import Ranks, RunOverRanks
from cp_rewrite.planning.plan_input import PlanInput, States
from cp_rewrite.refusal import Reason

OPS = ("cp_rewrite::gated_delta_rule", "cp_rewrite::kimi_delta", "cp_rewrite::ssd", "cp_rewrite::selective_scan")
_WEIGHTS = ("A",)
_ops: Any = torch.ops.cp_rewrite


def kind_of(node: fx.Node) -> str | None:
    """The name of the recurrence that a node is; None: it is none."""
    name = getattr(schema_of(node.target), "name", "")
    return name.partition("::")[2] if name in OPS else None


def recurrent(call: Call) -> tuple[Claims, RunOverRanks]:
    """A recurrence whose inputs have their tokens in dim 1, and weights that are the same on all ranks."""
    offsets = call.arg("offsets")
    resets = offsets is not None or call.facts.resets
    if offsets is not None and call.facts.sources.get(id(offsets)) not in call.facts.offsets:
        detail = f"{call.name} starts anew at offsets that are not known to be the packing's: pass the argument that "
        raise Mixes(detail + "packing=cp.CuSeqlens(...) names, or a copy of it", Reason.MASK_WRONG_SOURCE)
    front = (None if call.extents.batch == 1 else (B,), (T,))
    attended = False
    for name, x in call.bound.items():
        if name == "offsets" or not isinstance(x, Tensor):
            continue
        state = call.state(x)
        if name in _WEIGHTS:
            if state is not REPLICATED:
                raise Mixes(f"{call.name} with a weight {name} made from tokens")
        elif not isinstance(state, Rows) or state.dims != front + (None,) * (x.ndim - 2):
            raise Mixes(f"{call.name} of {name} without tokens in dim 1, or with more than rows in dim 0")
        else:
            attended |= state.attended
    states = States(resets, apart=attended and not resets)
    return Rows(front + (None,) * (call.outs[0].ndim - 2)), OnPieces(states, _summary_bytes(call))


def alone(call: Call) -> Claims:
    """Never right on a rank's tokens alone: refused for what stands against `recurrent`, else for that."""
    recurrent(call)
    raise Mixes(f"{call.name} passes a state through the tokens of a row, which other ranks have: needs resolve=True")


def _summary_bytes(call: Call) -> int:
    """What one cut piece does to the state."""
    inputs = [x for name, x in call.bound.items() if name != "offsets" and isinstance(x, Tensor)]
    state, move = state_shapes(call.name.partition("::")[2], inputs)
    return (math.prod(state) + math.prod(move)) * wide(inputs[0].dtype).itemsize


@dataclass(frozen=True)
class OnPieces:
    """Runs a recurrence on a rank's pieces. states: what the state passes through. bytes: of a piece's summary."""

    states: States
    bytes: int

    @property
    def why(self) -> str:
        """For the report."""
        if self.states.resets:
            return "document by document: what pieces do to the state goes to the ranks that have later ones"
        return (
            "over the whole row, as on one process, which hands the state on from document to document: where that is "
            "not meant: Sharding(reset_states=True)"
        )

    @property
    def reads(self) -> tuple[PlanInput, ...]:
        return PlanInput.of_states(self.states)

    def __call__(self, ranks: Ranks, func: Any, args: dict[str, Any]) -> Tensor:
        tables = [ranks.plan[key] for key in self.reads]
        on_pieces = getattr(_ops, func._schema.name.partition("::")[2] + "_on_pieces").default
        return on_pieces(*(tables if name == "offsets" else x for name, x in args.items()), ranks.group)[0]
