"""Replace proven attention nodes by exchange and packed attention. The only code that mutates a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._dynamo.source import LocalSource
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.fx.proxy import GraphAppendingTracer

from cp_rewrite.batch import PlanInput
from cp_rewrite.kernels.params import Params
from cp_rewrite.ops.attention import attend

from .state import Decision, State


def rewrite_sites(state: State) -> State:
    """Add the plan's tensors as inputs, put packed attention in the place of each site, drop what only masks read."""
    gm = state.graph_module
    mode = _fake_mode(gm)
    inputs = _add_inputs(state, mode)
    for position in state.positions:
        _replace_position(position.node, inputs[PlanInput("row_index")], mode)
    for decision in state.decisions:
        _rewrite_site(decision, state, inputs, mode)
    _erase_dead([decision.site.mask_node for decision in state.decisions])
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
        _set_fake_input(last, state, key, mode)
        last.meta["cp_rewrite"] = "rewrite_sites"
    return nodes


def _set_fake_input(node: fx.Node, state: State, key: PlanInput, mode: FakeTensorMode) -> None:
    """Give a new input its fake values: one in the graph's mode, one (`example_input`) in the inner compiler's.

    While a backend runs, Dynamo's tracing context holds a fresh mode that shares the graph's symbols.
    """
    tensor = state.plan.example(key)
    context = TracingContext.try_get()
    inner = mode if context is None or context.fake_mode is None else context.fake_mode
    if key.name == "row_index":
        # As long as a row's tokens, by the graph's own symbol: a symbol of its own would have to be guarded equal.
        fake = _empty(inner, (_token_size(state),), tensor)
    else:
        # Lengths differ from batch to batch; what has a fixed size (columns, ranks) is static.
        dynamic = DimDynamic.STATIC if key.name == "splits" else DimDynamic.DYNAMIC
        sizes = [dynamic if dim == 0 else DimDynamic.STATIC for dim in range(tensor.ndim)]
        symbols = StatelessSymbolicContext(dynamic_sizes=sizes)  # type: ignore[call-arg]
        fake = inner.from_tensor(tensor, source=LocalSource(node.name), symbolic_context=symbols)
    node.meta["example_input"] = fake
    node.meta["example_value"] = fake if inner is mode else _empty(mode, fake.shape, tensor)


def _empty(mode: FakeTensorMode, shape: Sequence[Any], like: Tensor) -> Tensor:
    with mode:
        return torch.empty(shape, dtype=like.dtype, device=like.device)


def _fake_mode(gm: fx.GraphModule) -> FakeTensorMode:
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    return next(value.fake_mode for value in values if isinstance(value, FakeTensor))


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


def _erase_dead(masks: Iterable[fx.Node | None]) -> None:
    """Erase the nodes that computed masks nobody reads any more: pure ones only, from the masks back to the inputs."""
    pending = [mask for mask in dict.fromkeys(masks) if mask is not None]
    erased: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in erased or node.users or node.op in ("placeholder", "output") or not _is_pure(node):
            continue
        parents = list(node.all_input_nodes)
        node.graph.erase_node(node)
        erased.add(node)
        pending.extend(parents)


_PURE_MODULES = ("torch", "math", "torch._C._nn", "torch._tensor", "torch.nn.functional")
_IMPURE_OPERATORS = frozenset(
    getattr(operator, f"i{name}")
    for name in ("add", "and", "floordiv", "lshift", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor")
) | {operator.setitem, operator.delitem}
_RANDOM = {"rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "dropout", "manual_seed"}


def _is_pure(node: fx.Node) -> bool:
    """Known to have no effect: no in-place method or function, no random number, no toggle of global state."""
    if node.op in ("get_attr", "call_method"):
        return not str(node.target).endswith("_")
    if node.op != "call_function" or "out" in node.kwargs:
        return False
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", "")
    if module == "_operator":
        return target not in _IMPURE_OPERATORS
    if module in ("torch._C", "builtins", "torch._VariableFunctions"):
        module = "torch"
    return module in _PURE_MODULES and not name.startswith("_") and not name.endswith("_") and name not in _RANDOM
