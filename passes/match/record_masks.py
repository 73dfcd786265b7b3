"""Keep each mask's computation from before the rewrite, so that it can be run on real tensors and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.canonicalize import Canonical, CanonicalizeError
from cp_rewrite.passes.graph.dynamo_internals import FlexBlocks
from cp_rewrite.passes.graph.regions import Scope, attribute_of, nested_scopes, resolve
from cp_rewrite.passes.match.flex import flex_arguments, is_flex, mask_function
from cp_rewrite.passes.match.prove_masks import Prover, reader_of
from cp_rewrite.passes.values.recorded_mask import RecordedMask, RecordedTensor
from cp_rewrite.passes.values.site import Site
from cp_rewrite.passes.values.state import State
from cp_rewrite.refusal import source_line


def record_masks(state: State) -> State:
    """Record the masks that will be compared: all with `verify="first_step"`, else those that the graph does not prove:
    the user's word, and flex_attention's, whose lists of blocks must say the same as its mask function."""
    everything = state.sharding.verify != "never"
    sites = [site for site in state.sites if everything or site.assumed or _flex_of(site) is not None]
    if not sites or state.refusals:
        return state
    recorder = _Recorder(state)
    for site in sites:
        recorder.record(site)
    return replace(state, masks=tuple(recorder.recorded.values()))


def _flex_of(site: Site) -> fx.Node | None:
    node = site.node.args[0] if site.node.args else None
    return node if isinstance(node, fx.Node) and is_flex(node) else None


class _Recorder:
    def __init__(self, state: State) -> None:
        self.names, self.given = state.tokens.names, state.tokens.masks
        self.prover = Prover(state.sharding, state.tokens)
        self.scopes = {id(scope.gm): scope for scope in reversed(list(_scopes(Scope(state.graph_module))))}
        self.inputs = state.graph_module.graph.find_nodes(op="placeholder")
        self.recorded: dict[Any, RecordedMask] = {}
        self.tokens = tuple(found.tokens for found in state.tokens.inputs)
        self.rows = tuple(found.rows for found in state.tokens.inputs)

    def record(self, site: Site) -> None:
        scope = self.scopes[id(site.graph_module)]
        flex = _flex_of(site)
        if flex is not None:
            self._record_flex(scope, site, flex)
            return
        outer, source = resolve(scope, site.mask_node)
        reader = reader_of(scope, site.node, outer)
        key = (outer, source, site.mask)
        if not isinstance(source, fx.Node) or key in self.recorded:
            return
        try:
            canonical = self.prover.trace(outer, source, site.logits, reader)
        except CanonicalizeError:  # a mask that can't be traced is the user's word, and can't be run either
            return
        # One zero stands for all logits, where none of them are viewed otherwise or written to.
        plain = not canonical.updated and all(node.meta["example_value"].ndim == 4 for node in site.logits)
        self._add(key, site, canonical, site.logits[: int(plain)])

    def _record_flex(self, scope: Scope, site: Site, node: fx.Node) -> None:
        args = flex_arguments(node)
        read = FlexBlocks.read(args["block_mask"])
        key = (scope, *read.lists, read.mask_mod.target, *args["mask_mod_other_buffers"], site.mask)
        if key in self.recorded:
            return
        body, source, indices = mask_function(scope, node, args)
        canonical = self.prover.trace(body, source)
        found = [resolve(scope, x) for x in read.lists]
        blocks = tuple(self._tensor(self.prover.trace(*x, before=reader_of(scope, node, x[0]))) for x in found)
        self._add(key, site, canonical, (), tuple(map(canonical.leaves.get, indices)), blocks, read.size)

    def _add(self, key: Any, site: Site, canonical: Canonical, zeros: Sequence[fx.Node], *flex: Any) -> None:
        if not site.assumed and not self.given.keys().isdisjoint(canonical.leaves):
            return  # `shard` compares the masks of every batch
        meaning = site.mask, site.assumed, source_line(site.node)
        self.recorded[key] = RecordedMask(self._tensor(canonical, zeros), *meaning, self.tokens, self.rows, *flex)

    def _tensor(self, canonical: Canonical, zeros: Sequence[fx.Node] = ()) -> RecordedTensor:
        leaves = canonical.leaves
        held = {ref: value for n, ref in leaves.items() if isinstance(value := attribute_of(n), Tensor)}
        for node in zeros:
            held[leaves[node]] = torch.zeros(1, 1, 1, 1, dtype=leaves[node].dtype)
        return RecordedTensor(
            canonical,
            {ref: self.names[n] for n, ref in leaves.items() if n in self.names},
            {ref: self.inputs.index(n) for n, ref in leaves.items() if n in self.inputs},
            held,
        )


def _scopes(scope: Scope) -> Iterator[Scope]:
    yield scope
    for _, inner in nested_scopes(scope):
        if inner is not None:
            yield from _scopes(inner)
