"""Replace proven attention nodes by exchange and packed attention. The only code that mutates a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.fx.proxy import GraphAppendingTracer

from cp_rewrite.batch import PlanInput
from cp_rewrite.kernels.params import Params
from cp_rewrite.ops.attention import attend

from .canonicalize import fake_mode_of
from .state import Decision, State


def rewrite_sites(state: State) -> State:
    """Add the plan's tensors as inputs, put packed attention in the place of each site, drop what only masks read."""
    gm = state.graph_module
    mode = fake_mode_of(gm)
    inputs = _add_inputs(state, mode)
    for position in state.positions:
        _replace_position(position.node, inputs[PlanInput("row_index")], mode)
    for decision in state.decisions:
        _rewrite_site(decision, state, inputs, mode)
    for decision in state.decisions:
        _erase_dead_mask(decision.site.mask_node)
    gm.recompile()
    return replace(state, inputs=tuple(inputs))


def _add_inputs(state: State, mode: FakeTensorMode) -> dict[PlanInput, fx.Node]:
    keys = dict.fromkeys(key for d in state.decisions for key in PlanInput.of_site(d.site.mask, d.exchange))
    if state.positions:
        keys[PlanInput("row_index")] = None
    masks = list(dict.fromkeys(key.mask for key in keys if key.mask))
    graph = state.graph_module.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    nodes: dict[PlanInput, fx.Node] = {}
    for key in keys:
        name = "_".join(["cp", key.name] + ([str(masks.index(key.mask))] if key.mask else []))
        with graph.inserting_after(last):
            last = nodes[key] = graph.placeholder(name)
        last.meta["example_value"] = _fake_input(state, key, last.name, mode)
        last.meta["cp_rewrite"] = "rewrite_sites"
    return nodes


def _fake_input(state: State, key: PlanInput, name: str, mode: FakeTensorMode) -> Tensor:
    tensor = state.plan_tensor(key)
    if key.name == "row_index":
        # As long as a row's tokens, by the graph's own symbol: a symbol of its own would have to be guarded equal.
        with mode:
            return torch.empty(_token_size(state), dtype=tensor.dtype, device=tensor.device)
    # Lengths differ from batch to batch; what has a fixed size (columns, ranks) is static.
    fixed = key.name == "splits"
    sizes = [DimDynamic.DYNAMIC if dim == 0 and not fixed else DimDynamic.STATIC for dim in range(tensor.ndim)]
    context = StatelessSymbolicContext(dynamic_sizes=sizes)  # type: ignore[call-arg]
    return mode.from_tensor(tensor, source=LocalSource(name), symbolic_context=context)


def _token_size(state: State) -> Any:
    for node, name in state.source_of.items():
        if name in state.sharding.tokens:
            return node.meta["example_value"].shape[state.sharding.tokens[name]]
    raise AssertionError("positions are made from a token size, so the graph has a token input")


def _rewrite_site(decision: Decision, state: State, inputs: dict[PlanInput, fx.Node], mode: FakeTensorMode) -> None:
    site, sharding = decision.site, state.sharding
    graph = site.graph_module.graph
    value = site.node.meta["example_value"]
    tracer = GraphAppendingTracer(graph)
    plan = [fx.Proxy(inputs[key], tracer) for key in PlanInput.of_site(site.mask, decision.exchange)]
    group = sharding.group_name if sharding.world_size > 1 else ""
    where = (decision.exchange, group, sharding.world_size)
    scale = site.query.meta["example_value"].shape[-1] ** -0.5 if site.scale is None else site.scale
    params = Params(float(scale), site.softcap, sharding.deterministic)

    def emit() -> Any:
        q, k, v = (_rows(fx.Proxy(node, tracer), value.dtype) for node in (site.query, site.key, site.value))
        out = attend(q, k, v, plan[:4], plan[4:], where, params, decision.kernel, sharding.keep_kv)[0]
        return out.unflatten(0, (_batch_size(site.query, tracer), -1)).transpose(1, 2)

    new = _insert(site.node, emit, mode)
    site.node.replace_all_uses_with(new)
    name = site.node.name
    graph.erase_node(site.node)
    new.name = name


def _rows(x_BHTD: fx.Proxy, dtype: torch.dtype) -> fx.Proxy:
    """(B * T, H, D); under autocast attention runs in another dtype than its inputs have."""
    x = x_BHTD if x_BHTD.node.meta["example_value"].dtype == dtype else x_BHTD.to(dtype)
    return x.transpose(1, 2).flatten(0, 1)


def _batch_size(query: fx.Node, tracer: GraphAppendingTracer) -> Any:
    size = query.meta["example_value"].shape[0]
    return size if isinstance(size, int) else fx.Proxy(query, tracer).size(0)


def _replace_position(node: fx.Node, row_index: fx.Node, mode: FakeTensorMode) -> None:
    tracer = GraphAppendingTracer(node.graph)
    value = node.meta["example_value"]
    new = _insert(node, lambda: fx.Proxy(row_index, tracer).to(value.dtype), mode)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _insert(before: fx.Node, emit: Callable[[], Any], mode: FakeTensorMode) -> fx.Node:
    """Run `emit` on proxies in front of a node; the new nodes get its source position and fake values."""
    graph = before.graph
    old = set(graph.nodes)
    with graph.inserting_before(before):
        result = emit().node
    for node in graph.nodes:
        if node not in old:
            for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
                if key in before.meta:
                    node.meta[key] = before.meta[key]
            node.meta["cp_rewrite"] = "rewrite_sites"
            node.meta["example_value"] = _fake_value(node, mode)
    return result


def _fake_value(node: fx.Node, mode: FakeTensorMode) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["example_value"])
    with mode, torch.no_grad():
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)


def _erase_dead_mask(mask: fx.Node | None) -> None:
    """Erase the nodes that computed a mask nobody reads any more: pure ones only, from the mask back to the inputs."""
    pending: list[fx.Node] = [] if mask is None else [mask]
    while pending:
        node = pending.pop()
        if node.users or node.op in ("placeholder", "output") or not _is_pure(node) or node.graph is None:
            continue
        parents = list(node.all_input_nodes)
        node.graph.erase_node(node)
        pending.extend(parents)


_PURE_MODULES = ("torch", "_operator", "math", "torch._C._nn", "torch._tensor", "torch.nn.functional")


def _is_pure(node: fx.Node) -> bool:
    """Known to have no effect: no in-place method or function, no random number, no toggle of global state."""
    if node.op in ("get_attr",):
        return True
    if node.op == "call_method":
        return not str(node.target).endswith("_")
    if node.op != "call_function" or "out" in node.kwargs:
        return False
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
    name = getattr(target, "__name__", "")
    inplace = name.endswith("_") and not name.endswith("__") or target in _inplace_operators()
    return not inplace and not name.startswith("_") and _module_of(target) in _PURE_MODULES and name not in _RANDOM


_RANDOM = {"rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "dropout", "manual_seed"}


def _module_of(target: Any) -> str:
    module = getattr(target, "__module__", None) or ""
    return "torch" if module in ("torch._C", "builtins", "torch._VariableFunctions") else module


def _inplace_operators() -> Iterable[Any]:
    return (operator.setitem, operator.iadd, operator.isub, operator.imul, operator.iand, operator.ior, operator.ixor)
