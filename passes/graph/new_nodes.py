"""Nodes that passes add to a graph, with the fake values that Dynamo would have given them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.fx as fx
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from cp_rewrite.torch_internals import (
    FakeTensorMode,
    enable_python_dispatcher,
    expression,
    fake_tensor,
    is_parameter,
    is_wrapped,
    memory_id,
    ones_open,
    symbolic,
)

from .nodes import attribute_of, hold

_POSITION = ("stack_trace", "nn_module_stack", "source_fn_stack")


def call(node: fx.Node, values: Callable[[fx.Node], Any]) -> Any:
    """Run a node's function or method on other values of its operands."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), values)
    target: Any = node.target
    return getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)


def fake_value(node: fx.Node, mode: FakeTensorMode) -> Any:
    """The fake value that a node computes from its operands' fake values, without a gradient."""
    # As Dynamo runs ops: without the dispatcher, `pad` would fix the token count to the example's.
    with mode, enable_python_dispatcher(), torch.no_grad():
        return call(node, lambda n: n.meta["example_value"])


class FakeValues:
    """Fake values of nodes whose ops write nothing. Layers are alike: an op runs once for all arguments that it can't
    tell apart.

    No change of the graph makes wrong what is remembered: keys hold values, no nodes. Memory is not remembered: a view
    is made of the operand at hand.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._known: dict[Any, Callable[[list[Tensor]], Any]] = {}

    def of(self, node: fx.Node) -> Any:
        key = (node.op, node.target, _signature(node.args), _signature([*node.kwargs.items()]))
        operands = tree_leaves([n.meta["example_value"] for n in node.all_input_nodes])
        tensors = [x for x in operands if isinstance(x, Tensor)]
        if key in self._known:
            with torch.no_grad():
                return self._known[key](tensors)
        value = fake_value(node, self.mode)
        again = _maker_of_like(value, tensors, self.mode)
        if again is not None:
            self._known[key] = again
        return value


def _signature(arg: Any) -> Any:
    """A key of an argument, equal for arguments that an op can't tell apart."""
    if isinstance(arg, fx.Node):
        return _signature(arg.meta["example_value"])
    if isinstance(arg, Tensor):
        return arg.dtype, arg.device, _signature((*arg.shape, *arg.stride(), arg.storage_offset()))
    if isinstance(arg, list | tuple):
        return tuple(map(_signature, arg))
    if isinstance(arg, slice):
        return slice, _signature((arg.start, arg.stop, arg.step))
    return type(arg), expression(arg) if isinstance(arg, SymInt | SymFloat | SymBool) else arg


def _maker_of_like(value: Any, operands: list[Tensor], mode: FakeTensorMode) -> Callable[[list[Tensor]], Any] | None:
    """A function that makes the like of an op's value of other operands: a view of the only one, or new tensors. None:
    it is neither, or the op makes a size that is not known before it runs."""
    results = tree_leaves(value)
    if not all(isinstance(x, Tensor) and not x.is_complex() for x in results) or free_unbacked_symbols(results):
        return None
    memory, theirs = [memory_id(x) for x in results], [memory_id(x) for x in operands]
    if memory == theirs and isinstance(value, Tensor) and value.dtype == operands[0].dtype:
        size, stride, offset = value.shape, value.stride(), value.storage_offset()
        return lambda tensors: tensors[0].as_strided(size, stride, offset)
    apart = len({*memory, *theirs}) == len(memory) + len({*theirs})
    if not apart or any(expression(x.storage_offset()) != 0 for x in results):
        return None
    return lambda _: tree_map(lambda x: new_fake_tensor(mode, x, x.shape, x.stride()), value)


def new_fake_tensor(mode: FakeTensorMode, like: Tensor, shape: Sequence[Any], stride: Sequence[Any]) -> Tensor:
    """A fake tensor with memory of its own, of the dtype and device of another."""
    return fake_tensor(mode, torch.empty_strided(shape, stride, dtype=like.dtype, device="meta"), like.device)


def insert(
    before: fx.Node, emit: Callable[[], fx.Proxy], mode: FakeTensorMode, why: str, known: FakeValues | None = None
) -> fx.Node:
    """Run `emit` on proxies in front of a node; the new nodes get its source position and fake values."""
    last = before.prev
    with before.graph.inserting_before(before):
        result = emit().node
    node = last.next
    while node is not before:
        node.meta.update(position_of(before), cp_rewrite=why)
        node.meta["example_value"] = fake_value(node, mode) if known is None else known.of(node)
        node = node.next
    return result


def size_of(x: fx.Proxy, dim: int) -> Any:
    """The size of a tensor in a graph: a number, or what asks for it."""
    size = x.node.meta["example_value"].shape[dim]
    return size if isinstance(size, int) else x.size(dim)


def take_place(node: fx.Node, new: fx.Node, mode: FakeTensorMode) -> fx.Node:
    """Let all that read `node` read `new`, and erase it."""
    # Nested regions take their word for it that no gradient comes in where an output's example needs none.
    with mode:
        needed = node.meta["example_value"].requires_grad
        new.meta["example_value"] = new.meta["example_value"].detach().requires_grad_(needed)
    node.replace_all_uses_with(new)
    name = node.name
    node.graph.erase_node(node)
    new.name = name
    return new


def place_by(new: fx.Node, like: fx.Node, mode: FakeTensorMode) -> None:
    """Give a new node what `like` says of its place in the source, and the fake value of its own operands.

    A gradient reaches it where one reaches an operand, unless none reaches `like`.
    """
    own = ("example_value", "unbacked_bindings")  # what `like` gives, and the sizes that its data decides
    new.meta = {key: value for key, value in like.meta.items() if key not in own}
    with tracing(mode):
        value = fake_value(new, mode)
    if isinstance(value, Tensor):
        operands = [n.meta["example_value"] for n in new.all_input_nodes]
        needed = any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(operands))
        given = getattr(like.meta.get("example_value"), "requires_grad", True)
        value = value.detach().requires_grad_(needed and given and (value.is_floating_point() or value.is_complex()))
    new.meta["example_value"] = value


Maker = Callable[..., fx.Node]
"""Makes a node of a target and its arguments."""


def maker(before: fx.Node, mode: FakeTensorMode) -> Maker:
    """A function that makes nodes in front of a node, in its place of the source: of a function, or a method's name,
    and its arguments."""

    def new(target: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        with before.graph.inserting_before(before):
            op = "call_method" if isinstance(target, str) else "call_function"
            made = before.graph.create_node(op, target, args, kwargs)
        place_by(made, before, mode)
        return made

    return new


@contextmanager
def autocasts_open(autocasts: Iterable[Sequence[Any]]) -> Generator[None]:
    """Open the autocast regions that a node stands in, which decide on dtypes. autocasts: their arguments."""
    with ExitStack() as stack:
        for autocast in autocasts:
            entered = torch.amp.autocast_mode._enter_autocast(*autocast)
            stack.callback(torch.amp.autocast_mode._exit_autocast, entered)
        yield


def position_of(node: fx.Node) -> dict[str, Any]:
    """The part of a node's `meta` that says where in the model's source it comes from."""
    return {key: node.meta[key] for key in _POSITION if key in node.meta}


@contextmanager
def tracing(mode: FakeTensorMode) -> Generator[None]:
    """Run ops on fake tensors: no autograd, no new guards, since the shapes are those that Dynamo saw already; and
    as then a size that is 1 in the example is any.

    Attention, where its keys are no tokens, falls apart into products and a softmax.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if mode.shape_env is not None:
            stack.enter_context(mode.shape_env.suppress_guards())
            stack.enter_context(ones_open(mode.shape_env))
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.callback(setattr, mode, "allow_non_fake_inputs", mode.allow_non_fake_inputs)
        mode.allow_non_fake_inputs = True
        yield


def traced(run: Callable[..., Any], values: Sequence[Any], mode: FakeTensorMode) -> fx.GraphModule:
    """The ATen ops that `run` calls on values, among them fake tensors of `mode`.

    A detach is kept: torch from 2.15 on drops it unless a table of decompositions, here an empty one, is given, and
    gradients would flow where the function stops them.
    """
    with tracing(mode), mode, enable_python_dispatcher():
        return make_fx(run, decomposition_table={})(*(v.detach() if isinstance(v, Tensor) else v for v in values))


def paste(module: fx.GraphModule, operands: Sequence[fx.Node], before: fx.Node, like: fx.Node, why: str) -> Any:
    """Put the nodes of a traced function in front of a node, and return what gives its results.

    Args:
        operands: in the place of its inputs. like: the node whose place in the source new nodes get.
    """
    env = dict(zip(module.graph.find_nodes(op="placeholder"), operands, strict=True))
    with before.graph.inserting_before(before):
        for node in module.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], env.__getitem__)
            if node.op == "get_attr":
                env[node] = _pasted_attribute(node, before.graph)
            elif node.op != "placeholder":
                env[node] = before.graph.node_copy(node, env.__getitem__)
                env[node].meta = {"example_value": node.meta["val"]}
            if node.op != "placeholder":
                env[node].meta.update(position_of(like), cp_rewrite=why)
    raise AssertionError("a graph has an output")


def _pasted_attribute(node: fx.Node, graph: fx.Graph) -> fx.Node:
    value = attribute_of(node)
    copy = graph.get_attr(hold(graph.owning_module, value))
    copy.meta["example_value"] = value
    return copy


def give_sizes(nodes: Sequence[fx.Node], sizes: Mapping[Any, Any], mode: FakeTensorMode) -> None:
    """Give nodes fake values of other sizes, as of `OtherSizes`; views share memory as before."""
    values = [x for node in nodes for x in tree_leaves(node.meta.get("example_value")) if isinstance(x, Tensor)]
    new = OtherSizes(sizes, mode)
    new.memory = {memory_id(x) for x in values if new.differs(x)}
    for node in nodes:
        if "example_value" in node.meta:
            node.meta["example_value"] = tree_map(new.value, node.meta["example_value"])


class OtherSizes:
    """Makes values of other sizes: what stands for a symbol, or another expression. `memory`: of tensors that have
    others then, with all that shares it."""

    def __init__(self, sizes: Mapping[Any, Any], mode: FakeTensorMode) -> None:
        self.sizes, self.mode, self.memory = sizes, mode, set[int]()
        self._bases: dict[int, Tensor] = {}
        self._numbers: dict[Any, Any] = {}
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def differs(self, x: Tensor) -> bool:
        if x.layout != torch.strided or is_wrapped(x):  # of masks, which are no longer read
            return False
        numbers = (*x.shape, *x.stride(), x.storage_offset())
        return any(isinstance(n, SymInt) and self.of(expression(n)) != expression(n) for n in numbers)

    def of(self, expr: Any) -> Any:
        """An expression of sizes, with the others in it."""
        return expr.xreplace(self.sizes)

    def number(self, value: Any) -> Any:
        """A size with the others in it."""
        if not isinstance(value, SymInt | SymFloat | SymBool):
            return value
        expr = expression(value)
        if (expr, type(value)) not in self._numbers:
            other = symbolic(self.mode.shape_env, self.of(expr), type(value)) if expr.free_symbols else value
            self._numbers[expr, type(value)] = other
        return self._numbers[expr, type(value)]

    def value(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return self.number(value)
        if value.layout != torch.strided or is_wrapped(value) or memory_id(value) not in self.memory:
            return value
        if id(value) not in self._known:
            other: Any = self._view(value).requires_grad_(value.requires_grad)
            if is_parameter(value):  # a weight stays one where views of it get other sizes
                other._is_param = True
            self._known[id(value)] = value, other
        return self._known[id(value)][1]

    def made(self, x: Tensor) -> Tensor:
        """A tensor of its own."""
        return new_fake_tensor(self.mode, x, *self._geometry(x))

    def _geometry(self, x: Tensor) -> tuple[list[Any], list[Any]]:
        return [*map(self.number, x.shape)], [*map(self.number, x.stride())]

    def _view(self, x: Tensor) -> Tensor:
        """A fake tensor like x, which shares memory with others where x does."""
        memory = memory_id(x)
        if memory not in self._bases:
            size = self.number(x.untyped_storage().nbytes()) // x.element_size()
            self._bases[memory] = torch.empty((size,), dtype=x.dtype, device="meta")
        base = self._bases[memory].view(x.dtype)
        return fake_tensor(self.mode, base.as_strided(*self._geometry(x), self.number(x.storage_offset())), x.device)
