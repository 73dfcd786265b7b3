"""Find the attention nodes of a Dynamo graph, and bring each into one normal form, a Site.

    attention                                           is read in
    scaled_dot_product_attention(q, k, v, mask)         this file
    softmax(q @ k.mT * scale + mask) @ v                written
    flex_attention(q, k, v, score_mod, block_mask)      flex
    varlen_attn(q, k, v, cu_seqlens, …), flash-attn     flex

`prove_masks` says what the mask means, `operands` whether operands fit, and which heads keys and values had before they
were repeated.

Two passes stand here: `match_attention`, and before it `record_masks`, which runs later and keeps masks of sites.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cp_rewrite.masks import PackedMask
from cp_rewrite.passes.graph.canonicalize import Canonical, CanonicalizeError
from cp_rewrite.passes.graph.dynamo import FlexBlocks
from cp_rewrite.passes.graph.nodes import (
    Scope,
    attribute_of,
    bind,
    constant,
    graph_modules,
    is_transformed,
    nested_graphs,
    nested_scopes,
    resolve,
    same_size,
    shape_of,
)
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.values.state import RecordedMask, RecordedTensor, Site, State, Table
from cp_rewrite.refusal import Reason, Refusal, source_line
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import expression

from .flex import (
    check_blocks,
    flex_arguments,
    is_flex,
    is_varlen,
    mask_function,
    mask_of,
    output_of,
    read_varlen,
    softcap_of,
)
from .operands import check_operands, check_options, ungroup
from .prove_masks import Prover, reader_of
from .written import Differs, common_form, is_softmax, read_written


def record_masks(state: State) -> State:
    """Record the masks that will be compared: all with `verify="first_step"`, else those that the graph does not prove:
    the user's word, and flex_attention's, whose lists of blocks must say the same as its mask function.

    Each mask's computation is kept from before the rewrite, so that it can be run on real tensors.
    """
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


_SDPA: frozenset[Any] = frozenset(
    {
        torch.nn.functional.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
    }
)
_DEFAULTS: dict[str, Any] = {
    "query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0, "is_causal": False,
    "scale": None, "enable_gqa": False,
}  # fmt: skip
Found = Site | list[Refusal]


@dataclass(frozen=True)
class Matched:
    """Attention that was found in a graph.

    Args:
        sites: proven attention nodes, in graph order.
        refusals: every reason why another attention node is none.
        refused: those other nodes -> the Site that each would be, with a mask that means nothing, where its operands
            fit.
        tables: buffers whose numbers masks were proven by.
        offsets: arguments that tell documents of keys apart, and must hold what the packing's own does.
    """

    sites: list[Site]
    refusals: list[Refusal]
    refused: dict[fx.Node, Site | None]
    tables: dict[fx.Node, Table]
    offsets: dict[fx.Node, str]


def match_attention(state: State) -> State:
    """Find every attention node and prove what its mask means."""
    found = match_sites(state.graph_module, state.sharding, state.tokens)
    refusals = (*state.refusals, *found.refusals)
    also = {"refused": found.refused, "tables": found.tables, "offsets": found.offsets}
    return replace(state, sites=tuple(found.sites), refusals=refusals, **also)


def match_sites(gm: fx.GraphModule, sharding: Sharding, tokens: TokenAxis) -> Matched:
    """The attention nodes of `gm` and of its nested regions, proven or refused.

    Args:
        gm: a Dynamo graph: nodes carry fake tensors in `meta["example_value"]`.
        sharding: the annotation; `tokens` and `packing` name arguments.
        tokens: which inputs carry tokens, unified.
    """
    matcher = _Matcher(sharding, tokens)
    sites: dict[fx.Node, Site] = {}
    refusals: dict[tuple[Any, ...], Refusal] = {}
    for scope, node in matcher.attention_nodes(Scope(gm)):
        found = matcher.match(scope, node)
        if isinstance(found, Site) and sites.setdefault(node, found) != found:
            detail = f"calls of one region give its attention different masks: {sites[node].mask} and {found.mask}"
            found = [Refusal(Reason.NESTED_REGION, detail, node)]
        if found and not isinstance(found, Site):
            matcher.refused.setdefault(node, None)
            refusals |= {(r.reason, r.detail, r.node, node if r.node is None else None): r for r in found}
    refusals |= {(r.reason, r.detail, r.node): r for r in matcher.unreachable}
    prover = matcher.prover
    return Matched(list(sites.values()), list(refusals.values()), matcher.refused, prover.tables, prover.offsets)


def is_sdpa(node: fx.Node) -> bool:
    """True if a node is `scaled_dot_product_attention`, by any of its names."""
    return node.op == "call_function" and node.target in _SDPA


def _is_attention_over(node: fx.Node, tokens: TokenAxis) -> bool:
    """True if a node is attention over tokens, or a softmax that may be part of one."""
    if is_sdpa(node):
        return _over_tokens(node, tokens)
    return _is_module(node) or is_flex(node) or is_varlen(node) or is_softmax(node)


def _over_tokens(node: fx.Node, tokens: TokenAxis) -> bool:
    """True if attention's keys may be tokens. Else each query reads a memory, or what its own token has: an image's
    patches, latents, earlier layers. That is a softmax between two products, which the rules of other ops are for."""
    shape = shape_of(bind(node, _DEFAULTS).get("key"))
    if shape is None or not tokens.symbols:
        return True
    return bool(expression(shape[-2]).free_symbols & tokens.symbols)


def _is_module(node: fx.Node) -> bool:
    """True if a node is what `nn.MultiheadAttention` calls."""
    return node.op == "call_function" and node.target is torch.nn.functional.multi_head_attention_forward


class _Matcher:
    """Reads the attention of one graph.

    `unreachable`: refusals of attention in regions that can't be entered. `refused`: as of `Matched`. `_heads`: answers
    of `ungroup`. `_nodes`: of a region, what may be attention and what calls others. `_sites`: of each call of
    `scaled_dot_product_attention`, by what its mask means.
    """

    def __init__(self, sharding: Sharding, tokens: TokenAxis) -> None:
        self.sharding, self.tokens = sharding, tokens
        self.prover = Prover(sharding, tokens)
        self.unreachable: list[Refusal] = []
        self.refused: dict[fx.Node, Site | None] = {}
        self._heads: dict[Any, bool] = {}
        self._nodes: dict[fx.Graph, dict[fx.Node, bool]] = {}
        self._sites: dict[Any, Found] = {}

    def attention_nodes(self, scope: Scope) -> Iterator[tuple[Scope, fx.Node]]:
        """(region, node) of each node that may be attention, in a region and in those inside of it."""
        calls, graph = dict(nested_scopes(scope)), scope.gm.graph
        if graph not in self._nodes:
            attends = {n: _is_attention_over(n, self.tokens) for n in graph.nodes}
            self._nodes[graph] = {n: found for n, found in attends.items() if found or n in calls}
        for node, attends in self._nodes[graph].items():
            if attends:
                yield scope, node
            else:
                inner = calls[node]
                if inner is not None:
                    yield from self.attention_nodes(inner)
                elif _holds_attention(node):
                    detail = f"attention inside {node.target}, which is no plain call of a region"
                    self.unreachable.append(Refusal(Reason.NESTED_REGION, detail, node))

    def match(self, scope: Scope, node: fx.Node) -> Found:
        """The Site of a node, or the reasons why it is none; [] for a softmax that is no attention."""
        if is_transformed(node):
            if is_softmax(node):  # perhaps of something else than attention
                return []
            return [Refusal(Reason.NESTED_REGION, "attention inside torch.vmap or another torch.func transform", node)]
        if _is_module(node):
            detail = (
                "nn.MultiheadAttention is read where nothing reads its weights (need_weights=False), and where it has "
                "no add_bias_kv, add_zero_attn or keys of its own, outside of autocast"
            )
            return [Refusal(Reason.UNREAD_ATTENTION, detail, node)]
        if is_flex(node):
            return self._match_flex(scope, node)
        if is_varlen(node):
            return self._match_varlen(scope, node)
        return self._match_written(scope, node) if is_softmax(node) else self._match_sdpa(scope, node)

    def _match_sdpa(self, scope: Scope, node: fx.Node) -> Found:
        args = bind(node, _DEFAULTS, **_DEFAULTS)
        operands = [args[name] for name in ("query", "key", "value")]
        output, form = node, "BHTD"
        if all(len(shape_of(x) or ()) == 3 for x in operands):
            try:
                operands, output, form = common_form(operands, node, {"NTD"}, self.tokens.rows)
            except Differs as error:
                return [Refusal(Reason.SHAPE, error.detail, node)]
            args |= dict(zip(("query", "key", "value"), operands, strict=True))
        mask, assumed = self._mask(scope, args["attn_mask"], node, args, form=form)
        known = node, mask, assumed
        if isinstance(mask, list) or known not in self._sites:  # else another call of its region has the same
            found = self._site(scope, output, args, mask, form, mask_node=args["attn_mask"], assumed=assumed)
            if isinstance(mask, list):
                return found
            self._sites[known] = found
        return self._sites[known]

    def _match_written(self, scope: Scope, node: fx.Node) -> Found:
        written = read_written(scope, node, self.prover.local_tokens, self.tokens)
        if isinstance(written, list):
            return written
        args = {**_DEFAULTS, **written.arguments}
        mask_node, logits = written.mask
        reader = node if logits else written.logits[-1]
        mask, assumed = self._mask(scope, mask_node, reader, args, logits, written.form)
        more = {"softcap": written.softcap, "sinks": written.sinks, "logits": logits}
        return self._site(scope, written.output, args, mask, written.form, mask_node=mask_node, assumed=assumed, **more)

    def _match_varlen(self, scope: Scope, node: fx.Node) -> Found:
        read, output = read_varlen(node), output_of(node)
        refusals = [*read.refusals, *([output] if isinstance(output, Refusal) else [])]
        mask = mask_of(scope, node, read, self.prover)
        found = self._site(
            scope, node if isinstance(output, Refusal) else output, read.args, mask, read.form, softcap=read.softcap
        )
        return found if not refusals else refusals + (found if isinstance(found, list) else [])

    def _match_flex(self, scope: Scope, node: fx.Node) -> Found:
        args = flex_arguments(node)
        output, softcap = output_of(node), softcap_of(node, args)
        shape, mask = shape_of(args["query"]), []
        if shape is not None and len(shape) == 4:
            body, result, indices = mask_function(scope, node, args)
            mask = self.prover.prove(body, result, node, shape, indices)
            if isinstance(mask, PackedMask):
                mask = check_blocks(scope, node, args, self.prover, mask) or mask
        found = self._site(scope, node, args, mask)
        refused = self.refused.pop(node, None)
        if refused is not None and isinstance(output, fx.Node):
            self.refused[output] = replace(refused, node=output)
        if isinstance(found, list) or isinstance(output, Refusal) or isinstance(softcap, Refusal):
            others = [r for r in (output, softcap) if isinstance(r, Refusal)]
            return others + (found if isinstance(found, list) else [])
        return replace(found, node=output, softcap=softcap)

    def _mask(
        self,
        scope: Scope,
        mask: Any,
        reader: fx.Node,
        args: Mapping[str, Any],
        logits: Sequence[fx.Node] = (),
        form: str = "BHTD",
    ) -> tuple[PackedMask | list[Refusal], bool]:
        """(what the mask that `reader` reads means, whether that is the user's word)."""
        assumed = self.sharding.assume_mask
        if mask is None:
            found = PackedMask(causal=bool(args["is_causal"]), packed=False)
            if not self.sharding.block_tokens or found == assumed:
                return found, False
            detail = (
                "no mask comes into this block, as where a shard holds tokens of one document only: give the block a "
                f"mask tensor on every rank, or assume_mask={found!r} if there is none"
            )
            return [Refusal(Reason.MASK_OPAQUE, detail, reader)], False
        shape = shape_of(args["query"])
        if shape is None or len(shape) != len(form):
            return [], False
        sizes = dict(zip(form, shape, strict=True))
        found = self.prover.prove(scope, mask, reader, [sizes.get(letter, 1) for letter in "BHT"], logits=logits)
        opaque = isinstance(found, list) and all(r.reason is Reason.MASK_OPAQUE for r in found)
        if opaque and assumed is not None:
            return assumed, True
        return found, False

    def _site(
        self,
        scope: Scope,
        node: fx.Node,
        args: Mapping[str, Any],
        mask: PackedMask | list[Refusal],
        form: str = "BHTD",
        **more: Any,
    ) -> Found:
        """A Site where the operands fit and the mask is known; `more` are further fields of it."""
        refusals = [*check_operands(node, args, self.prover.local_tokens, form), *check_options(node, args)]
        refusals = refusals or (self._check_rows(node, args["query"]) if form[0] == "B" else [])
        if refusals:
            return refusals + (mask if isinstance(mask, list) else [])
        key, value = ungroup(scope.gm, args["query"], args["key"], args["value"], self._heads, node, form.find("H"))
        known = PackedMask() if isinstance(mask, list) else mask
        site = Site(node, scope.gm, args["query"], key, value, known, scale=constant(args["scale"]), form=form, **more)
        if isinstance(mask, list):
            self.refused[node] = site
            return mask
        return site

    def _check_rows(self, node: fx.Node, query: fx.Node) -> list[Refusal]:
        """A refusal where heads or other things were made rows of the batch: each row is cut in an order of its own."""
        rows = query.meta["example_value"].shape[0]
        if same_size(rows, self.tokens.rows):
            return []
        detail = f"query has {rows} batch rows, the annotated inputs have {self.tokens.rows}"
        return [Refusal(Reason.SHAPE, detail, node)]


def _holds_attention(node: fx.Node) -> bool:
    """True if a graph that a node is given to run holds attention that is not written out."""
    modules = (module for body in nested_graphs(node).values() for module in graph_modules(body))
    return any(is_sdpa(inner) or is_flex(inner) or is_varlen(inner) for gm in modules for inner in gm.graph.nodes)
