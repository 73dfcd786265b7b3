"""Prove the masks of a graph: each is traced once, however many layers read it."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.masks import PackedMask
from cp_rewrite.passes.graph.canonicalize import Canonical, CanonicalizeError, canonicalize, fixed
from cp_rewrite.passes.graph.dynamo import input_value, is_of_module, source_name, source_of
from cp_rewrite.passes.graph.nodes import Scope, enclosing, reached, read_by, resolve, value_of
from cp_rewrite.passes.graph.tokens import TokenAxis, passed_numbers
from cp_rewrite.passes.predicate.decide import prove
from cp_rewrite.passes.predicate.evaluate import Evaluator
from cp_rewrite.passes.values.state import Table
from cp_rewrite.refusal import Reason, Refusal, source_line
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import is_parameter

_LIBRARIES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def maker_of(mask: fx.Node) -> fx.Node:
    """The node whose line says what a mask is: where a library's line makes it, the last flags of the user's program
    among what it is made of, as a mask function that a model of transformers was given; the mask itself without any."""
    if not source_line(mask, in_model=False).startswith(_LIBRARIES):
        return mask
    made_of = reached([mask], lambda node: node.all_input_nodes)
    known = [node for node in mask.graph.nodes if node in made_of and node.stack_trace]
    flags = [node for node in known if getattr(node.meta.get("example_value"), "dtype", None) is torch.bool]
    own = [node for node in flags if not source_line(node, in_model=False).startswith(_LIBRARIES)]
    return own[-1] if own else mask


class Prover:
    """Proves what masks of one graph mean for the row that the annotation describes.

    `local_tokens`: what counts a shard's tokens. `tables`: the buffers that masks were found to read. `offsets`: the
    arguments that must hold what the packing's own does.
    """

    def __init__(self, sharding: Sharding, tokens: TokenAxis) -> None:
        self.sharding, self.tokens = sharding, tokens
        self.local_tokens = tokens.counts
        self.tables: dict[fx.Node, Table] = {}
        self.offsets: dict[fx.Node, str] = {}
        self._masks: dict[Any, PackedMask | list[Refusal]] = {}
        self._weighed: dict[tuple[Scope, fx.Node], bool] = {}

    def prove(
        self,
        scope: Scope,
        mask: fx.Node,
        node: fx.Node,
        shape: Sequence[Any],
        indices: Sequence[fx.Node] = (),
        logits: Sequence[fx.Node] = (),
    ) -> PackedMask | list[Refusal]:
        """The meaning of `mask`, which the attention `node` of `scope` reads, or refusals.

        Args:
            shape: (B, H, T) of the queries. indices: placeholders that stand for b, h, q and k.
            logits: the mask is what is added to the first of these nodes on the way to the last, `mask` itself.
        """
        # One mask feeds all layers, often through the regions of many checkpointed calls.
        outer, source = resolve(scope, mask)
        if not isinstance(source, fx.Node):
            return [Refusal(Reason.MASK_OPAQUE, f"the mask is {source!r}", node)]
        key = (outer, source, tuple(str(s) for s in shape[:3]))
        if key in self._masks:
            return self._masks[key]
        try:
            canonical = self.trace(outer, source, logits, reader_of(scope, node, outer))
        except CanonicalizeError as error:
            detail = f"the mask's computation can't be traced: {error}"
            return [Refusal(Reason.MASK_UNSUPPORTED_OP, detail, error.node)]
        found = self.meaning(canonical, source, shape, indices, logits[:1])
        if not canonical.updated:  # else it says another thing to another reader
            self._masks[key] = found
        return found

    def meaning(
        self,
        canonical: Canonical,
        mask: fx.Node,
        shape: Sequence[Any],
        indices: Sequence[fx.Node] = (),
        zeros: Sequence[fx.Node] = (),
    ) -> PackedMask | list[Refusal]:
        """The meaning of a traced mask, or refusals, which name `maker_of` it; arguments as of `predicate.prove`."""
        tables = {node: table for node in canonical.leaves if (table := self._table(node)) is not None}
        self.tables |= tables
        names = self._name, self.local_tokens
        named = maker_of(mask)
        return prove(canonical, named, shape, self.sharding, *names, indices, zeros, self.tokens.masks, tables)

    def argument(self, scope: Scope, tensor: Any, node: fx.Node) -> str:
        """The argument whose numbers the 1-d `tensor` holds, in another dtype perhaps, when `node` of `scope` reads it;
        a description of any other tensor."""
        outer, source = resolve(scope, tensor)
        if not isinstance(source, fx.Node):
            return str(source)
        try:
            canonical = self.trace(outer, source, before=reader_of(scope, node, outer))
        except CanonicalizeError as error:
            return f"%{source.name}, which can't be traced: {error}"
        leaf = Evaluator(self.local_tokens, self._name).copied(canonical)
        if leaf is not None:
            return leaf.name
        return f"%{source.name}, which changes in place" if canonical.updated else f"%{source.name}"

    def number(self, scope: Scope, value: Any) -> Any:
        """A number that an attention node is given, fixed by a guard if a caller passed it; None: it is computed."""
        outer, source = resolve(scope, value)
        root = [*enclosing(outer), outer][0]
        found = fixed(value_of(source), passed_numbers(root.gm)) if isinstance(source, fx.Node) else source
        return found if isinstance(found, int) else None

    def must_equal(self, name: str) -> bool:
        """Note that an argument must hold the packing's offsets in every batch; False: it is no argument, or is cut, or
        is not compared, since a step that is replayed compares nothing."""
        found = [node for node, known in self.tokens.names.items() if known == name and self.tokens.input(node) is None]
        if self.sharding.capacity is not None:
            return name == self.sharding.packing.arg
        self.offsets |= dict.fromkeys(found, name)
        return bool(found)

    def trace(
        self, scope: Scope, mask: fx.Node, logits: Sequence[fx.Node] = (), before: fx.Node | None = None
    ) -> Canonical:
        """The mask's computation as ATen, back to inputs, weights and the first of `logits`; see `canonicalize`."""

        def stop(scope: Scope, node: fx.Node) -> bool:
            return node is logits[0] if node in logits else self.holds_weights(scope, node)

        return canonicalize(scope, mask, stop, before)

    def _table(self, node: fx.Node) -> Table | None:
        """The numbers of a buffer of the model, where they are a table of distances."""
        buffer, source = input_value(node), source_of(node)
        if not isinstance(buffer, Tensor) or is_parameter(buffer) or source is None or not is_of_module(source):
            return None
        return self.tables.get(node) or Table.read(source_name(source), buffer)

    def _name(self, node: fx.Node) -> str:
        # A value inside the model may be called like an argument: only arguments go by their plain name.
        return self.tokens.names.get(node, f"%{node.name}")

    def holds_weights(self, scope: Scope, node: fx.Node) -> bool:
        """True if a node's value comes from weights: no mask does, and tracing stops there."""
        key = scope, found = resolve(scope, node)
        if not isinstance(found, fx.Node):
            return False
        if key not in self._weighed:
            for n in scope.gm.graph.nodes:
                self._weighed[scope, n] = is_parameter(n.meta.get("example_value")) or any(
                    self.holds_weights(scope, arg) for arg in read_by(n) if arg.op != "get_attr"
                )
                if n is found:
                    break
        return self._weighed[key]


def reader_of(scope: Scope, node: fx.Node, outer: Scope) -> fx.Node:
    """The node of `outer` that reads what `node` reads in `scope`, a region inside: the call on the way there."""
    while scope is not outer and scope.call is not None and scope.parent is not None:
        scope, node = scope.parent, scope.call
    return node
