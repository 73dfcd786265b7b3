"""Exchange and packed attention in the place of one attention node."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch.fx.proxy import GraphAppendingTracer

from cp_rewrite.batch.active.plan import site_inputs
from cp_rewrite.kernels.params import Params
from cp_rewrite.ops.attention import attend
from cp_rewrite.ops.narrow.gathered_attention import attend_gathered
from cp_rewrite.passes.graph.new_nodes import insert, size_of, take_place
from cp_rewrite.passes.values.state import Decision
from cp_rewrite.sharding import Sharding

from .copy_nodes import copy_behind
from .plan_inputs import Inputs


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

    return take_place(site.node, insert(site.node, emit, inputs.mode, "rewrite_sites"), inputs.mode)


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
