"""Keep each mask's computation from before the rewrite, so that it can be run on real tensors and compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.refusal import source_line

from .canonicalize import CanonicalizeError, Scope, nested_scopes, resolve
from .locality_inputs import token_dims
from .match_flex import flex_arguments, is_flex, mask_function
from .prove_masks import Prover
from .recorded import RecordedMask
from .sites import Site
from .state import State


def record_masks(state: State) -> State:
    """Record the masks that will be compared: all with `verify="first_step"`, else those that are the user's word."""
    everything = state.sharding.verify == "first_step"
    sites = [site for site in state.sites if everything or site.assumed]
    if not sites or state.refusals:
        return state
    recorder = _Recorder(state)
    for site in sites:
        recorder.record(site)
    return replace(state, masks=tuple(recorder.recorded.values()))


class _Recorder:
    def __init__(self, state: State) -> None:
        self.state = state
        self.prover = Prover(state.sharding, state.source_of)
        self.scopes = {id(scope.gm): scope for scope in reversed(list(_scopes(Scope(state.graph_module))))}
        self.inputs = [n for n in state.graph_module.graph.nodes if n.op == "placeholder"]
        self.recorded: dict[Any, RecordedMask] = {}
        self.tokens, self.rows = self._symbols()

    def record(self, site: Site) -> None:
        scope = self.scopes[id(site.graph_module)]
        source, indices = site.mask_node, []
        flex = site.node.args[0] if site.node.args else None
        if isinstance(flex, fx.Node) and is_flex(flex):
            scope, source, indices = mask_function(scope, flex, flex_arguments(flex))
        scope, source = resolve(scope, source)
        key = (scope, source, site.mask) if not indices else (site.node, site.mask)
        if not isinstance(source, fx.Node) or key in self.recorded:
            return
        try:
            canonical = self.prover.trace(scope, source, site.logits)
        except CanonicalizeError:  # a mask that can't be traced is the user's word, and can't be run either
            return
        leaves = canonical.leaves
        held = {ref: value for n, ref in leaves.items() if isinstance(value := _held(n), Tensor)}
        if site.logits:  # what the mask is added to counts as 0
            held[leaves[site.logits[0]]] = torch.zeros(1, 1, 1, 1, dtype=leaves[site.logits[0]].dtype)
        self.recorded[key] = RecordedMask(
            canonical,
            site.mask,
            site.assumed,
            source_line(site.node),
            {ref: self.state.source_of[n] for n, ref in leaves.items() if n in self.state.source_of},
            {ref: self.inputs.index(n) for n, ref in leaves.items() if n in self.inputs},
            held,
            tuple(leaves.get(node) for node in indices),
            self.tokens,
            self.rows,
        )

    def _symbols(self) -> tuple[frozenset[sympy.Expr], frozenset[sympy.Expr]]:
        tokens: set[sympy.Expr] = set()
        rows: set[sympy.Expr] = set()
        dims = token_dims(self.state.sharding)
        for node, name in self.state.source_of.items():
            dim = dims.get(name)
            if dim is not None:
                shape = node.meta["example_value"].shape
                tokens |= _symbol(shape[dim])
                rows |= _symbol(shape[dim - 1]) if dim else set()
        return frozenset(tokens), frozenset(rows)


def _symbol(size: Any) -> set[sympy.Expr]:
    return {size.node.expr} if isinstance(size, torch.SymInt) else set()


def _scopes(scope: Scope) -> Iterator[Scope]:
    yield scope
    for _, inner in nested_scopes(scope):
        if inner is not None:
            yield from _scopes(inner)


def _held(node: fx.Node) -> Any:
    if node.op != "get_attr":
        return None
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value
