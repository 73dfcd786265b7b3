"""Exchange and packed attention in the place of one attention node. At a cut rows are exchanged, and the nodes behind
it run once more, on the rows that came.

Shapes: R local rows, E expanded rows, C columns of all rows of one dtype.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch.fx.proxy import GraphAppendingTracer

from cp_rewrite.batch.active import site_inputs
from cp_rewrite.kernels.select import Params
from cp_rewrite.ops.attention import attend, attend_gathered
from cp_rewrite.ops.exchange import padded_columns
from cp_rewrite.passes.graph.new_nodes import autocasts_open, insert, size_of, take_place
from cp_rewrite.passes.graph.nodes import value_of
from cp_rewrite.passes.values.state import Cut, Decision, TokenRows
from cp_rewrite.planning.routes.by_exchange import Exchange
from cp_rewrite.planning.row_map import TokenCount
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import FakeTensorMode

from .inputs import Inputs


def rewrite_site(
    decision: Decision, sharding: Sharding, inputs: Inputs, replaced: Mapping[fx.Node, fx.Node], name: str
) -> fx.Node:
    """The node that takes the site's place. `replaced`: attention may read an earlier one's output as it is. name: of
    the site, for `max_logits`."""
    site, graph = decision.site, decision.node.graph
    value = site.node.meta["example_value"]
    tracer = GraphAppendingTracer(graph)
    plan = [fx.Proxy(inputs.node(graph, key), tracer) for key in site_inputs(site.mask, decision.exchange_name)]
    scale = site.query.meta["example_value"].shape[-1] ** -0.5 if site.scale is None else site.scale
    params = Params(float(scale), site.softcap, sharding.deterministic)
    operands = [replaced.get(node, node) for node in site.operands]
    if decision.cut is not None:
        copies = copy_behind(decision.cut, site.node, replaced, plan[2], plan[4:], decision.exchange, inputs.mode)
        operands[1:3] = copies[site.key], copies[site.value]

    def emit() -> Any:
        nodes = [fx.Proxy(node, tracer) for node in operands]
        q, k, v = (_rows(node, value.dtype, site.form) for node in nodes[:3])
        sinks = nodes[3] if site.sinks is not None else None
        how = decision.exchange, params, decision.kernel, sharding.keep_kv
        if decision.cut is None:
            out = attend(q, k, v, plan[:4], plan[4:], *how, sinks, decision.heads, name)[0]
        else:
            out = attend_gathered(q, k, v, plan[:4], params, decision.kernel, sinks, name)[0]
        batch = partial(size_of, fx.Proxy(replaced.get(site.query, site.query), tracer), 0)
        return _of_form(out, site.form, batch)

    return take_place(site.node, insert(site.node, emit, inputs.mode, "rewrite_sites", inputs.known), inputs.mode)


def site_names(decisions: Sequence[Decision]) -> list[str]:
    """The module that each site is in, as `named_modules` has it; a second one in it gets a number."""
    names: list[str] = []
    seen: Counter[str] = Counter()
    for decision in decisions:
        stack = [*decision.node.meta.get("nn_module_stack", {}).values()]
        # L['self'].layers.0.attn; of the model itself there is no entry
        name = re.sub(r"^\w+(\[[^]]*\])*\.?", "", stack[-1][0]) if stack else ""
        name = name or "attention"
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


def _rows(x: fx.Proxy, dtype: torch.dtype, form: str) -> fx.Proxy:
    """(B * T, H, D) of `form`; under autocast attention runs in another dtype than its inputs have."""
    x = x if x.node.meta["example_value"].dtype == dtype else x.to(dtype)
    match form:
        case "THD":
            return x
        case "HTD":
            return x.transpose(0, 1)
        case "BTD":
            return x.flatten(0, 1).unsqueeze(1)
        case _:
            return (x.transpose(1, 2) if form == "BHTD" else x).flatten(0, 1)


def _of_form(out: fx.Proxy, form: str, batch: Callable[[], Any]) -> fx.Proxy:
    """The inverse of `_rows`; `batch`: how many rows the batch has."""
    match form:
        case "THD":
            return out
        case "HTD":
            return out.transpose(0, 1)
        case "BTD":
            return out.squeeze(1).unflatten(0, (batch(), -1))
        case _:
            out = out.unflatten(0, (batch(), -1))
            return out.transpose(1, 2) if form == "BHTD" else out


_ops: Any = torch.ops.cp_rewrite
_WHY = "exchange before keys and values"


def copy_behind(
    cut: Cut,
    site: fx.Node,
    replaced: Mapping[fx.Node, fx.Node],
    pieces: fx.Proxy,
    route: Sequence[fx.Proxy],
    exchange: Exchange,
    mode: FakeTensorMode,
) -> dict[fx.Node, fx.Node]:
    """Nodes of the cut, rows that travel among them -> the same over one row of E tokens.

    Args:
        site: in front of which new nodes are put. replaced: nodes that earlier rewrites put others in the place of.
        pieces, route: of the plan.
    """
    with autocasts_open(cut.autocasts):
        copies = _exchanged(cut, site, replaced, (pieces, route, exchange), mode)
        first = next(iter(copies.values()))
        token = next(rows.token for rows in cut.rows if copies[rows.node] is first)
        tracer = pieces.tracer
        size = insert(site, lambda: fx.Proxy(first, tracer).size(token), mode, _WHY)
        for node in cut.nodes:
            insert(site, lambda node=node: fx.Proxy(_copy(node, cut, copies, replaced, size), tracer), mode, _WHY)
    return copies


def _copy(
    node: fx.Node, cut: Cut, copies: dict[fx.Node, fx.Node], replaced: Mapping[fx.Node, fx.Node], size: fx.Node
) -> fx.Node:
    """The node once more, on what was copied. Rows that came are laid out anew: a view of them may have to copy."""
    graph = node.graph

    def source(n: fx.Node) -> Any:
        return _number(n, cut.numbers[n], size) if n in cut.numbers else copies.get(n) or replaced.get(n, n)

    args, kwargs = fx.map_arg((node.args, node.kwargs), source)
    is_view = node.op == "call_method" and node.target == "view" and not isinstance(node.args[-1], torch.dtype)
    target: Any = "reshape" if is_view else node.target
    copies[node] = graph.create_node(node.op, target, args, kwargs)
    return copies[node]


def _number(node: fx.Node, numbers: Any, size: fx.Node) -> Any:
    """The node or number that stands for a number among `size` rows; a tuple of them for a tuple."""
    graph = node.graph
    if isinstance(numbers, tuple):
        return tuple(_number(graph.call_function(operator.getitem, (node, i)), n, size) for i, n in enumerate(numbers))
    if not isinstance(numbers, TokenCount):
        return node if isinstance(numbers, torch.SymInt) else numbers
    return numbers.of(fx.Proxy(size)).node


def _exchanged(
    cut: Cut, site: fx.Node, replaced: Mapping[fx.Node, fx.Node], how: tuple[Any, Any, Exchange], mode: FakeTensorMode
) -> dict[fx.Node, fx.Node]:
    """Rows that travel -> those that came. All of one dtype travel together."""
    pieces, route, exchange = how
    tracer = pieces.tracer
    copies: dict[fx.Node, fx.Node] = {}
    for dtype in dict.fromkeys(value_of(rows.node).dtype for rows in cut.rows):
        parts = [rows for rows in cut.rows if value_of(rows.node).dtype == dtype]

        def emit(parts: Sequence[TokenRows] = parts, item_bytes: int = dtype.itemsize) -> Any:
            flat: Any = [_flat(fx.Proxy(replaced.get(x.node, x.node), tracer), x) for x in parts]
            flat = torch.cat(flat, 1) if len(flat) > 1 else flat[0]
            columns = sum(x.columns for x in parts)
            more = padded_columns(columns, item_bytes) - columns
            flat = torch.nn.functional.pad(flat, (0, more)) if more else flat
            where = exchange.kind, exchange.group, exchange.world_size
            return _ops.exchange_tokens.default(flat, pieces, list(route), *where)

        came = insert(site, emit, mode, _WHY)
        at = 0
        for x in parts:

            def take(came: fx.Node = came, x: TokenRows = x, at: int = at) -> Any:
                return _unflat(fx.Proxy(came, tracer).narrow(1, at, x.columns), x)

            copies[x.node] = insert(site, take, mode, _WHY)
            at += x.columns
    return copies


def _flat(x: Any, rows: TokenRows) -> Any:
    """(R, columns) of a tensor with tokens in some dim."""
    x = x.movedim(rows.token, 0)
    return x.flatten(1) if value_of(rows.node).ndim > 1 else x.unsqueeze(1)


def _unflat(x: Any, rows: TokenRows) -> Any:
    """The inverse for (E, columns): a tensor of one packed row of E tokens."""
    shape = value_of(rows.node).shape
    others = [size for dim, size in enumerate(shape) if dim != rows.token]
    x = x.unflatten(1, others) if others else x.squeeze(1)
    return x.movedim(0, rows.token).contiguous()
