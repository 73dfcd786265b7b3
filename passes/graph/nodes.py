"""Facts that passes ask of a graph, its nested regions and its nodes.

    Scope, region_call, resolve    which node runs which region, and where a value inside a region comes from
    graph_modules, give_body, …    regions' graphs, and changes of them
    modes_of                       which modes are open where nodes run: autocast, and whether gradients are recorded
    written_nodes, memory_of, …    which nodes write into memory, and whose memory it is
    shape_of, bind, op_name, …     a node's value, arguments, op, the numbers that the graph fixes, what it reads

A region is the body of a checkpoint or of a nested compile region: it is run once, on the operands of its call. Other
ways to run a nested graph (`cond`, `scan`, `map`) are no regions: nothing inside them is read or rewritten, and a graph
in which one of them matters is refused.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
import torch.fx as fx
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.torch_internals import (
    HigherOrderOperator,
    OpOverloadPacket,
    expression,
    fixed_number,
    hint,
    is_transform,
    is_wrapped,
    memory_id,
    unwrapped,
)


@dataclass(frozen=True, eq=False)
class Scope:
    """One region of a graph: the root, or the body of a nested region as one call enters it.

    Args:
        gm: the region's graph module.
        parent, call: the region around it and the node there that calls it; None for the root.
        operands: the body's placeholders -> the caller's nodes (or constants) that fill them.
    """

    gm: fx.GraphModule
    parent: Scope | None = None
    call: fx.Node | None = None
    operands: Mapping[fx.Node, Any] = field(default_factory=dict)


REGION_OPS = {"tag_activation_checkpoint": 1, "wrap_activation_checkpoint": 1, "wrap": 1, "invoke_subgraph": 2}
"""Higher-order ops that run their body once on their operands -> how many arguments stand before the operands: the
body, and for `invoke_subgraph` its name."""


@dataclass(frozen=True, eq=False)
class RegionCall:
    """A plain call of a nested region: `op(body, *operands)`, or `invoke_subgraph(body, "name", *operands)`.

    Operands are the last arguments of the node, one for each of the body's placeholders.
    """

    node: fx.Node
    body: fx.GraphModule
    operands: tuple[Any, ...]

    @property
    def filled(self) -> dict[fx.Node, Any]:
        """The body's placeholders -> what the call fills them with."""
        return dict(zip(self.body.graph.find_nodes(op="placeholder"), self.operands, strict=True))


def region_call(node: fx.Node) -> RegionCall | None:
    """A node as a plain call of a region; None for every other node, other ways to run a nested graph among them."""
    if not isinstance(node.target, HigherOrderOperator) or node.target.name() not in REGION_OPS:
        return None
    bodies = nested_graphs(node)
    operands = node.args[REGION_OPS[node.target.name()] :]
    if len(bodies) != 1 or node.args[0] is not next(iter(bodies)):
        return None
    body = bodies[node.args[0]]
    count = len(body.graph.find_nodes(op="placeholder"))
    return RegionCall(node, body, operands) if len(operands) == count else None


def is_checkpoint(node: fx.Node) -> bool:
    """True if a node calls a region that the backward computes once more."""
    return isinstance(node.target, HigherOrderOperator) and "checkpoint" in node.target.name()


def is_compile_region(node: fx.Node) -> bool:
    """True if a node that calls a region calls one that torch compiles once, however often it is called."""
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == "invoke_subgraph"


def is_function(node: fx.Node) -> bool:
    """True if a node calls a `torch.autograd.Function`, whose forward and backward are nested graphs."""
    return isinstance(node.target, HigherOrderOperator) and node.target.name() == "autograd_function_apply"


def nested_graphs(node: fx.Node) -> dict[fx.Node, fx.GraphModule]:
    """The graphs that a node is given to run: of a region, both branches of a `cond`, flex_attention's functions."""
    given = {arg: attribute_of(arg) for arg in node.all_input_nodes if arg.op == "get_attr"}
    return {arg: value for arg, value in given.items() if isinstance(value, fx.GraphModule)}


def graph_modules(root: fx.GraphModule) -> list[fx.GraphModule]:
    """A graph's module and those of its nested regions; a region comes behind those that call it."""
    return [module for module in root.modules() if isinstance(module, fx.GraphModule)]


def erase_unread_numbers(root: fx.GraphModule) -> None:
    """Erase numbers of sizes, and sizes that are asked for, which nothing in a graph or its nested regions reads."""
    for module in graph_modules(root):
        for node in reversed(module.graph.nodes):
            if node.users or node.op not in ("call_function", "call_method"):
                continue
            value = value_of(node)
            asked = op_name(node) in ("size", "getitem") and not isinstance(value, Tensor)
            if asked or isinstance(value, SymInt | SymFloat | SymBool):
                module.graph.erase_node(node)


def region_calls(root: fx.GraphModule) -> dict[fx.Graph, list[fx.Node]]:
    """The graph of each region of `root`, however deep -> its plain calls."""
    calls: dict[fx.Graph, list[fx.Node]] = {}
    for gm in graph_modules(root):
        for node in gm.graph.nodes:
            if (call := region_call(node)) is not None:
                calls.setdefault(call.body.graph, []).append(node)
    return calls


def nested_scopes(scope: Scope) -> Iterator[tuple[fx.Node, Scope | None]]:
    """Nodes of `scope` that run a nested graph, each with the scope that it enters; None where it is no plain call."""
    bodies = [n for n in scope.gm.graph.find_nodes(op="get_attr") if isinstance(attribute_of(n), fx.GraphModule)]
    callers = {caller for body in bodies for caller in body.users}
    for node in scope.gm.graph.nodes if callers else ():
        if node in callers:
            call = region_call(node)
            yield node, None if call is None else Scope(call.body, scope, node, call.filled)


def resolve(scope: Scope, node: Any) -> tuple[Scope, Any]:
    """The node that `node` is outside the regions it is merely passed into."""
    while scope.parent is not None and isinstance(node, fx.Node) and node in scope.operands:
        scope, node = scope.parent, scope.operands[node]
    return scope, node


def enclosing(scope: Scope) -> list[Scope]:
    """The regions around `scope`, the root first."""
    chain: list[Scope] = []
    while scope.parent is not None:
        scope = scope.parent
        chain.insert(0, scope)
    return chain


def outputs_of(gm: fx.GraphModule) -> list[Any]:
    """Values that a graph returns."""
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    returned = output.args[0]
    return list(returned) if isinstance(returned, tuple | list) else [returned]


def attribute_of(node: fx.Node) -> Any:
    """The attribute that a get_attr node reads; None for any other node."""
    return attrgetter(str(node.target))(node.graph.owning_module) if node.op == "get_attr" else None


def hold(owner: Any, value: Any) -> str:
    """The name of a new attribute of a graph's module, which holds a value: a nested graph, a constant."""
    name = next(name for i in itertools.count() if not hasattr(owner, name := f"cp_held_{i}"))
    setattr(owner, name, value)
    return name


def give_body(body: fx.GraphModule, target: Any, before: fx.Node) -> tuple[Any, ...]:
    """First arguments of a call of a region, in front of a node, whose body its graph's module holds from now on.

    Args:
        target: of `REGION_OPS`.
    """
    name = hold(before.graph.owning_module, body)
    with before.graph.inserting_before(before):
        read = before.graph.get_attr(name)
    return read, *[name] * (REGION_OPS[target.name()] - 1)


def read_as(node: fx.Node, value: Any, readers: Iterable[fx.Node]) -> None:
    """Let readers of a node read another value, a number perhaps, in its place."""
    for reader in readers:
        args = fx.map_arg((reader.args, reader.kwargs), lambda n: value if n is node else n)
        reader.args, reader.kwargs = args


Mode = tuple[tuple[Any, ...], bool]
"""The arguments of the autocasts that are open, and whether gradients are recorded."""


def modes_of(graph: fx.Graph) -> dict[fx.Node, Mode]:
    """Each node of a graph, in order, with its mode as far as the graph itself says."""
    autocasts: tuple[Any, ...] = ()
    switches = [bool(node.args[0]) for node in graph.nodes if _name(node) == "_set_grad_enabled"]
    grad = not switches[0] if switches else True
    found: dict[fx.Node, Mode] = {}
    for node in graph.nodes:
        match _name(node):
            case "_enter_autocast":
                autocasts = (*autocasts, node.args)
            case "_exit_autocast":
                autocasts = autocasts[:-1]
            case "_set_grad_enabled":
                grad = bool(node.args[0])
            case _:
                pass
        found[node] = autocasts, grad
    return found


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "")


_INPLACE = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "truediv": "div"}
_NUMPY = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}
"""Other names that torch's own functions take for an argument, as numpy has them."""
_REQUIRED = object()
"""The default of an argument that has none."""


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """The fake shape of a node's tensor."""
    value: Any = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else None


def value_of(node: fx.Node) -> Any:
    """A node's fake value; a constant's real one."""
    if "example_value" in node.meta:
        return node.meta["example_value"]
    return attribute_of(node)


def needs_gradient(node: fx.Node) -> bool:
    """True if gradients reach a node's tensor."""
    value = value_of(node)
    return isinstance(value, Tensor) and value.requires_grad


def is_transformed(node: fx.Node) -> bool:
    """True if a node takes gradients, or stands in, enters or leaves a `torch.func` transform (vmap, jvp)."""
    if is_transform(node.target):
        return True
    values = [value_of(n) for n in (node, *node.all_input_nodes)]
    return any(is_wrapped(value) for value in tree_leaves(values) if isinstance(value, Tensor))


def guard_number(value: Any) -> Any:
    """A symbolic number as the plain one it is in the example; a guard has another number compiled anew."""
    return float(value) if isinstance(value, torch.SymFloat) else int(value)


def guard_equal(size: Any, other: Any) -> bool:
    """True if two sizes are equal in the example; a guard has others compiled anew."""
    return bool(size == other)


def same_size(size: Any, other: Any) -> bool:
    """Equal sizes; where two symbols happen to be equal, a guard makes sure that they stay so."""
    if expression(size) == expression(other):
        return True
    hints = [hint(size), hint(other)]
    return None not in hints and hints[0] == hints[1] and guard_equal(size, other)


def constant(value: Any) -> float | None:
    """A number that the graph fixes; None for anything else, sizes of the batch among it."""
    if isinstance(value, fx.Node):
        value = value.meta.get("example_value")
    if isinstance(value, torch.SymFloat | torch.SymInt):
        return fixed_number(value)
    return float(value) if isinstance(value, int | float) else None


def bind(node: fx.Node, names: Iterable[str] | None = None, **defaults: Any) -> dict[str, Any]:
    """A node's arguments by name.

    Args:
        names: of the positional ones, in order. None: those that its op's schema or its function's signature has, with
            their defaults; no positional ones, where it has neither.
        defaults: of those that may be left out.
    """
    known = _signature(node.target) if names is None else dict.fromkeys(names, _REQUIRED)
    missing = {name: value for name, value in known.items() if value is not _REQUIRED}
    given = {name if name in known else _NUMPY.get(name, name): value for name, value in node.kwargs.items()}
    return {**missing, **defaults, **dict(zip(known, node.args, strict=False)), **given}


def bind_op(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of an op by name: those that are left out are as their default, or None."""
    values: dict[str, Any] = {}
    for i, (name, default) in enumerate(_signature(op).items()):
        missing = None if default is _REQUIRED else default
        values[name] = args[i] if i < len(args) else kwargs.get(name, missing)
    return values


def schema_of(target: Any) -> Any:
    """The schema of an op, or of a packet's default overload; None: the target of a node is no op."""
    return getattr(target, "_schema", None) or getattr(getattr(target, "default", None), "_schema", None)


@lru_cache(maxsize=4096)
def _signature(target: Callable[..., Any]) -> dict[str, Any]:
    """Argument -> its default, in order; {} of what tells none, as torch's functions in C++."""
    schema = schema_of(target)
    if schema is not None:
        return {a.name: a.default_value if a.has_default_value() else _REQUIRED for a in schema.arguments}
    try:
        parameters = inspect.signature(target).parameters.values() if callable(target) else ()
    except (TypeError, ValueError):
        return {}
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return {p.name: _REQUIRED if p.default is p.empty else p.default for p in named}


def op_name(node: Any) -> str:
    """A node's function or method by one name for its spellings: `add` for `+`, `+=`, `torch.add`, `x.add_`."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return ""
    name = str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")).strip("_")
    return _INPLACE.get(name, name)


def times_constant(node: Any) -> tuple[float | None, fx.Node | None]:
    """(c, x) when a node is c * x or x / (1 / c)."""
    name = op_name(node)
    if name not in ("mul", "div", "multiply", "divide") or len(node.args) != 2 or node.kwargs:
        return None, None
    left, right = node.args
    product = name in ("mul", "multiply")
    if product and constant(left) is not None:
        left, right = right, left
    c = constant(right) or filled(right)
    if not c or not isinstance(left, fx.Node):
        return None, None
    return (c if product else 1 / c), left


def filled(node: Any) -> float | None:
    """The number that a 0-d tensor is made of, as its dtype holds it: `torch.full([], 8 ** 0.5)`."""
    if op_name(node) not in ("full", "tensor", "scalar_tensor") or shape_of(node) != ():
        return None
    c = constant(node.args[-1]) if len(node.args) else None
    return None if c is None else float(torch.tensor(c, dtype=value_of(node).dtype))


_OF_SHAPE = frozenset(
    "zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty size dim".split()
)
_AS_ANOTHER = frozenset({"expand_as", "view_as", "reshape_as", "type_as"})


def read_by(node: fx.Node) -> list[fx.Node]:
    """The operands that a node reads numbers of, not their shape or dtype alone."""
    name = op_name(node)
    if name in _OF_SHAPE or (name == "getattr" and node.args[1] in ("shape", "dtype", "device")):
        return []
    return [*node.args[:1]] if name in _AS_ANOTHER else node.all_input_nodes  # type: ignore[list-item]


_DRAWING = frozenset(
    {f"dropout{dims}d" for dims in (1, 2, 3)}
    | {f"fractional_max_pool{dims}d{also}" for dims in (2, 3) for also in ("", "_with_indices")}
    | {"gumbel_softmax", "multi_head_attention_forward"}
)
"""Functions of torch that draw random numbers and are no op themselves."""


def draws_random_numbers(node: fx.Node) -> bool:
    """True if a node takes numbers from torch's generator, by its name: inside of transforms no op is seen."""
    name = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
    if name in _DRAWING:
        return True
    packet: Any = getattr(torch.ops.aten, name, None)  # `__get__` is no op
    overloads = packet.overloads() if isinstance(packet, OpOverloadPacket) else []
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags for overload in overloads)


def collective_group(node: fx.Node) -> str | None:
    """The name of the group that a collective runs over; None for any other node."""
    packet = getattr(node.target, "overloadpacket", node.target)
    if not str(getattr(packet, "_qualified_op_name", "")).startswith(("_c10d_functional", "c10d_functional")):
        return None
    return next((arg for arg in reversed(node.args) if isinstance(arg, str)), None)


def reached(nodes: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """The nodes, and all that are reached from them, where `following` gives those after each."""
    found, pending = set[fx.Node](), [*nodes]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += following(node)
    return found


_OPERATORS = frozenset(f for f in vars(operator).values() if callable(f))
_INPLACE_OPERATORS = frozenset(
    getattr(operator, f"i{name}")
    for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift concat".split()
) | {operator.setitem}
_PURE_METHODS = frozenset({"__invert__", "__index__", "__int__"})


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """Nodes whose memory this node writes into."""
    if node.op == "call_method":
        name = str(node.target)
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        return _first(node) if in_place or (name.startswith("__i") and name not in _PURE_METHODS) else []
    if node.op != "call_function":
        return []
    if node.kwargs.get("out") is not None:
        return _nodes(node.kwargs["out"])
    target: Any = node.target
    schema = schema_of(target)
    if schema is not None:
        aliases = {argument.name: argument.alias_info for argument in schema.arguments}
        return _nodes([bind(node).get(name) for name, alias in aliases.items() if alias and alias.is_write])
    if target in _OPERATORS:  # where and_, or_, not_ are pure
        return _first(node) if target in _INPLACE_OPERATORS else []
    name = getattr(target, "__name__", "")
    if (name.endswith("_") and not name.endswith("__")) or bind(node).get("inplace"):
        return _first(node) or list(node.all_input_nodes)
    return []


def writers_between(nodes: Sequence[fx.Node], start: fx.Node, end: fx.Node) -> list[fx.Node]:
    """Nodes that change the memory of `nodes` in place between two nodes of their graph."""
    memory = {memory_of(node) for node in nodes} - {None}
    found: list[fx.Node] = []
    node = start.next
    while node is not end and node.op != "root":
        if any(memory_of(target) in memory for target in written_nodes(node)):
            found.append(node)
        node = node.next
    return found


def written_memory(gm: fx.GraphModule) -> set[int]:
    """Identities of the storages that a graph, or a region that it calls, writes into."""
    found: set[int | None] = set()
    for module in reversed(graph_modules(gm)):  # regions before the graphs that call them
        for node in module.graph.nodes:
            found |= {memory_of(target) for target in written_nodes(node)}
            call = region_call(node)
            if call is not None:
                operands = [operand for inside, operand in call.filled.items() if memory_of(inside) in found]
                found |= {memory_of(operand) for operand in operands if isinstance(operand, fx.Node)}
    return {memory for memory in found if memory is not None}


def memory_of(node: fx.Node) -> int | None:
    """Identity of the storage of a node's fake tensor."""
    value = node.meta.get("example_value")
    value = unwrapped(value) if isinstance(value, Tensor) else None
    return None if value is None or value.layout != torch.strided else memory_id(value)


def _nodes(argument: Any) -> list[fx.Node]:
    return [leaf for leaf in tree_leaves(argument) if isinstance(leaf, fx.Node)]


def _first(node: fx.Node) -> list[fx.Node]:
    return _nodes(node.args[:1])
