"""Recurrences over tokens: gated delta rules, SSD and selective scans, as the whole ops of `cp_rewrite/ops/states/`.

In the place of a whole op stands the one that runs on a rank's pieces (`OnPieces`): each piece's effect on the state,
its summary, goes to the ranks that have later pieces of the sequence.

    y = gated_delta_rule(q, k, v, g, beta, None, …)   ->   y = gated_delta_rule_on_pieces(q, k, v, g, beta, tables, …)

Without offsets the sequence is a row of the batch, over the ends of its documents: what one process computes. With the
packing's own offsets (`Offsets`), or with `Sharding(reset_states=True)`, each document is one. Rows that hold no token
give 0.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.ops.states.maps import state_shapes, wide
from cp_rewrite.packing import CuSeqlens
from cp_rewrite.passes.graph.canonicalize import CanonicalizeError, canonicalize
from cp_rewrite.passes.graph.nodes import Scope, bind, memory_of, schema_of, value_of, written_memory
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.locality.call import Call
from cp_rewrite.passes.locality.claims import REPLICATED, B, Mixes, Rows, T
from cp_rewrite.passes.predicate.evaluate import Evaluator
from cp_rewrite.passes.values.edits import Ranks, RunOverRanks
from cp_rewrite.planning.plan_input import PlanInput, States
from cp_rewrite.refusal import Reason
from cp_rewrite.sharding import Sharding

from .rule import States as Claims

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
    """Bytes of what one cut piece does to the state."""
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
        """The reason that a report gives."""
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


class Offsets(Container[fx.Node]):
    """Nodes known to hold the packing's offsets, of a graph and its regions: the argument itself, and copies of it in
    another dtype or by another view. env: states of the nodes walked so far.

    cu_seqlens, cu_seqlens.long(), cu_seqlens[:], cu_seqlens.clone().view(-1)        the packing's
    cu_seqlens[1:], cu_seqlens + 1, cu_seqlens.flip(0), what is written over         others
    """

    def __init__(self, gm: fx.GraphModule, sharding: Sharding, tokens: TokenAxis, env: Mapping[fx.Node, Any]) -> None:
        self._written, self._counts, self._env = written_memory(gm), tokens.counts, env
        packing = sharding.packing
        given = packing.arg if isinstance(packing, CuSeqlens) and packing.padded_arg is None else None
        named = (node for node, name in tokens.names.items() if name == given)
        self._known = {node: memory_of(node) not in self._written for node in named}

    def __contains__(self, node: object) -> bool:
        return self._known.get(node, False)  # type: ignore[call-overload]

    def find(self, nodes: Sequence[Any]) -> list[bool]:
        """Which of some nodes are copies of what is known; they are known from now on."""
        for node in nodes:
            if isinstance(node, fx.Node) and node not in self._known:
                self._known[node] = any(self._known.values()) and self._is_copy(node)
        return [node in self for node in nodes]

    def read_by(self, node: fx.Node) -> None:
        """Look at what a recurrence is given."""
        if kind_of(node) is not None:
            self.find([bind(node)["offsets"]])

    def enter(self, body: fx.Graph, given: Sequence[bool]) -> None:
        """A nested region is walked, whose operands hold them or not."""
        self._known = {node: known for node, known in self._known.items() if node.graph is not body}
        self._known.update(zip(body.find_nodes(op="placeholder"), given, strict=True))

    def _is_copy(self, node: fx.Node) -> bool:
        value, module = value_of(node), node.graph.owning_module
        if not isinstance(value, Tensor) or value.ndim != 1 or value.is_floating_point() or module is None:
            return False
        stop = lambda _, n: n in self or self._env.get(n) is not REPLICATED  # noqa: E731
        try:
            canonical = canonicalize(Scope(module), node, stop)
        except CanonicalizeError:
            return False
        leaf = Evaluator(self._counts, lambda n: n.name).copied(canonical)
        made = [node, *(call.node for call in canonical.calls if call.node is not None)]
        return leaf is not None and leaf.node in self and not any(memory_of(n) in self._written for n in made)
