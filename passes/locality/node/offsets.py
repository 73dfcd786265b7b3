"""Nodes that hold the packing's offsets: the argument itself, and copies of it in another dtype or by another view.

cu_seqlens, cu_seqlens.long(), cu_seqlens[:], cu_seqlens.clone().view(-1)        the packing's
cu_seqlens[1:], cu_seqlens + 1, cu_seqlens.flip(0), what is written over         others
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch.fx as fx
from torch import Tensor

from cp_rewrite.packing import CuSeqlens
from cp_rewrite.passes.graph.canonicalize import CanonicalizeError, canonicalize
from cp_rewrite.passes.graph.nodes import bind, value_of
from cp_rewrite.passes.graph.regions import Scope
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.graph.writes import memory_of, written_memory
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED
from cp_rewrite.passes.locality.rules.over_ranks.recurrences import kind_of
from cp_rewrite.passes.predicate.evaluate import Evaluator
from cp_rewrite.sharding import Sharding


class Offsets(Container[fx.Node]):
    """Those that are known so far, of one graph and its nested regions. env: states of the nodes walked so far."""

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
