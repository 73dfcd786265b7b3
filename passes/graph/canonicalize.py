"""A tensor's computation as plain ATen calls: the one form that every spelling, torch version and vmap ends in."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from cp_rewrite.torch_internals import (
    OpOverload,
    TorchDispatchMode,
    enable_python_dispatcher,
    expression,
    fake_mode_of,
    fixed_number,
    hint,
    is_wrapped,
    known_number,
    leave_vmaps,
    memory_id,
    transform_depth,
)

from .nodes import Scope, attribute_of, enclosing, guard_number, nested_scopes, outputs_of, resolve, written_nodes
from .tokens import passed_numbers

# Their ATen ops can't be made functional.
_INPLACE_BITS = {
    operator.iand: Tensor.bitwise_and_,
    operator.ior: Tensor.bitwise_or_,
    operator.ixor: Tensor.bitwise_xor_,
}
_VMAP_BRACKETS = frozenset({"_vmap_increment_nesting", "_vmap_decrement_nesting", "lazy_load_decompositions"})


class CanonicalizeError(Exception):
    """A node of the slice could not be run on fake tensors. `node` is that node."""

    def __init__(self, node: fx.Node, message: str) -> None:
        super().__init__(message)
        self.node = node


@dataclass(frozen=True, eq=False)
class Ref:
    """A tensor between two calls. Sizes may be SymInts."""

    index: int
    shape: tuple[Any, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Call:
    """One ATen call. `args` and `kwargs` hold Refs where tensors stood; `node` is the Dynamo node it came from."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Ref | None, ...]
    node: fx.Node | None


@dataclass(frozen=True, eq=False)
class Canonical:
    """A slice as ATen: `calls` in order, from `leaves` (a node outside the slice -> its Ref) and `constants` (tensors
    of one known number, as `x[0] = 3` makes them) to `output`."""

    calls: tuple[Call, ...]
    leaves: Mapping[fx.Node, Ref]
    constants: Mapping[Ref, float]
    output: Ref
    updated: bool  # some op of the graph, before or after, changes one of the slice's tensors in place


def canonicalize(
    scope: Scope, node: fx.Node, stop: Callable[[Scope, fx.Node], bool], before: fx.Node | None = None
) -> Canonical:
    """Trace what computes `node` (which lives in `scope`) to ATen, back to placeholders, attributes and `stop` nodes.

    Every op runs once more on Dynamo's own fake tensors, below autograd, vmap and functionalization, so in-place
    updates of the sliced tensors come out as pure calls: those that stand before the node `before`, which reads `node`.

    Raises:
        CanonicalizeError: a node has no fake tensors or fails on them.
    """
    return _Tracer(stop, scope, before).trace(scope, node)


_LEVEL = {"_add_batch_dim": 2, "_remove_batch_dim": 1}
"""Functions that enter or leave a dim that a vmap runs over -> which argument says which vmap."""


class _Recorder(TorchDispatchMode):  # pyright: ignore[reportUntypedBaseClass]
    """Writes down every ATen call that reaches the bottom of the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.node: fx.Node | None = None
        self.constants: dict[Ref, float] = {}
        self._refs: dict[int, Ref] = {}
        self._alive: list[Tensor] = []  # ids are reused by the interpreter once a tensor dies

    def ref(self, tensor: Tensor) -> Ref:
        known = self._refs.get(id(tensor))
        if known is None:
            known = Ref(len(self._alive), tuple(tensor.shape), tensor.dtype)
            self._refs[id(tensor)] = known
            self._alive.append(tensor)
            number = known_number(tensor)
            if number is not None:
                self.constants[known] = number
        return known

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        flat = list(out) if isinstance(out, tuple | list) else [out]
        refs = tuple(self.ref(o) if isinstance(o, Tensor) else None for o in flat)
        named = (tree_map_only(Tensor, self.ref, args), tree_map_only(Tensor, self.ref, dict(kwargs or {})))
        if any(refs):
            self.calls.append(Call(func, *named, refs, self.node))
        return out


class _Tracer:
    def __init__(self, stop: Callable[[Scope, fx.Node], bool], scope: Scope, before: fx.Node | None) -> None:
        self.stop = stop
        self.updated = False
        self.depth = 0  # transforms around the graph's own
        self.ends: dict[Scope, fx.Node | None] = {scope: before}  # where a region is left: what follows came later
        while scope.parent is not None:
            self.ends[scope.parent], scope = scope.call, scope.parent
        self.numbers = passed_numbers(scope.gm)
        self.needed: dict[Scope, set[fx.Node]] = {}
        self.leaves: dict[fx.Node, Any] = {}
        self.calls: dict[Scope, dict[fx.Node, Scope | None]] = {}
        self.entered: dict[tuple[Scope, fx.Node], Scope] = {}

    def trace(self, scope: Scope, node: fx.Node) -> Canonical:
        self._collect(scope, node)
        recorder = _Recorder()
        tensors = [leaf for leaf in self.leaves.values() if isinstance(leaf, Tensor)]
        refs = {n: recorder.ref(v) for n, v in self.leaves.items() if isinstance(v, Tensor)}
        env: dict[tuple[Scope, fx.Node], Any] = {}

        def run(*leaves: Tensor) -> Any:
            values = iter(leaves)
            for leaf, value in self.leaves.items():
                self.leaves[leaf] = next(values) if isinstance(value, Tensor) else value
            with ExitStack() as vmaps:
                vmaps.callback(leave_vmaps, transform_depth())  # those that a failed run had entered
                self.depth = transform_depth() - depth
                for outer in [*enclosing(scope), scope]:
                    self._run_scope(outer, env, recorder)
            return self._value(scope, node, env)

        depth = transform_depth()
        mutates = any(written_nodes(n) for nodes in self.needed.values() for n in nodes)
        with ExitStack() as stack:
            fake_mode = fake_mode_of((node, *self.leaves))
            stack.enter_context(torch.no_grad())
            stack.enter_context(enable_python_dispatcher())
            if fake_mode is not None:
                stack.enter_context(fake_mode)
                if fake_mode.shape_env is not None:
                    stack.enter_context(fake_mode.shape_env.ignore_fresh_unbacked_symbols())
            stack.enter_context(recorder)
            out = torch.func.functionalize(run, remove="mutations")(*tensors) if mutates else run(*tensors)
        if not isinstance(out, Tensor):
            raise CanonicalizeError(node, f"{node.name} is no tensor")
        return Canonical(tuple(recorder.calls), refs, recorder.constants, recorder.ref(out), self.updated)

    def _collect(self, scope: Scope, root: fx.Node) -> None:
        """Mark what `root` is computed from, with in-place updates of it, through region calls both ways."""
        work = [(scope, root)]
        while work:
            work = self._collect_ancestors(work)
            work = self._collect_updates()

    def _collect_ancestors(self, work: list[tuple[Scope, fx.Node]]) -> list[tuple[Scope, fx.Node]]:
        while work:
            scope, node = work.pop()
            mine = self.needed.setdefault(scope, set())
            if node in mine or node in self.leaves:
                continue
            if scope.parent is not None and node in scope.operands:
                mine.add(node)
                outer = scope.operands[node]
                if isinstance(outer, fx.Node):
                    work.append((scope.parent, outer))
                continue
            value = node.meta.get("example_value")
            is_scalar = isinstance(value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)
            if node.op in ("placeholder", "get_attr") or is_scalar or self.stop(scope, node):
                self.leaves[node] = attribute_of(node) if value is None else fixed(value, self.numbers)
                continue
            mine.add(node)
            inner = self._enter_call(scope, node)
            if inner is not None:
                work.extend((inner, out) for out in outputs_of(inner.gm) if isinstance(out, fx.Node))
            else:
                work.extend((scope, arg) for arg in node.all_input_nodes)
        return work

    def _enter_call(self, scope: Scope, node: fx.Node) -> Scope | None:
        if scope not in self.calls:
            self.calls[scope] = dict(nested_scopes(scope))
        if node not in self.calls[scope]:
            return None
        inner = self.calls[scope][node]
        if inner is None:
            raise CanonicalizeError(node, f"{node.target} runs a nested graph and is no plain call of a region")
        self.entered[scope, node] = inner
        return inner

    def _collect_updates(self) -> list[tuple[Scope, fx.Node]]:
        """In-place ops on storages of the slice: they are users, not ancestors, of what they change."""
        work: list[tuple[Scope, fx.Node]] = []
        for scope, mine in list(self.needed.items()):
            inputs = [n for n in self.leaves if n.graph is scope.gm.graph and n.op == "placeholder"]
            storages = {s for n in (*mine, *inputs) for s in _storages(n)}
            has_vmap = any("batch_dim" in str(n.target) for n in mine)
            later = False
            for node in scope.gm.graph.nodes:
                later |= node is self.ends.get(scope)
                updates = any(storages & set(_storages(target)) for target in written_nodes(node))
                self.updated |= updates
                brackets = has_vmap and getattr(node.target, "__name__", "") in _VMAP_BRACKETS
                if node not in mine and not later and (updates or brackets):
                    # Not for `stop` to leave out, even where it brings in weights: the slice would lose the update.
                    mine.add(node)
                    self.leaves.pop(node, None)
                    work.extend((scope, arg) for arg in node.all_input_nodes)
        return work

    def _run_scope(self, scope: Scope, env: dict[tuple[Scope, fx.Node], Any], recorder: _Recorder) -> None:
        for node in scope.gm.graph.nodes:
            if node not in self.needed.get(scope, ()) or node.op == "placeholder" or (scope, node) in env:
                continue
            recorder.node = node
            inner = self.entered.get((scope, node))
            if inner is not None:
                self._run_scope(inner, env, recorder)
                env[scope, node] = tuple(self._value(inner, out, env) for out in outputs_of(inner.gm))
            else:
                env[scope, node] = self._run_node(scope, node, env)

    def _run_node(self, scope: Scope, node: fx.Node, env: dict[tuple[Scope, fx.Node], Any]) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._value(scope, n, env))
        level = _LEVEL.get(getattr(node.target, "__name__", ""))
        if level is not None:  # vmaps are numbered from the outermost transform
            args = (*args[:level], args[level] + self.depth, *args[level + 1 :])
        try:
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            if node.target is operator.getitem and _indexes_by_scalars(args):
                # Dynamo keeps such indices as tensors; plain indexing would read their values.
                return torch.ops.aten.index(args[0], list(args[1]) if isinstance(args[1], tuple) else [args[1]])
            if node.op == "call_function" and callable(node.target):
                return _INPLACE_BITS.get(node.target, node.target)(*args, **kwargs)
        except CanonicalizeError:
            raise
        except Exception as error:  # whatever an op raises on fake tensors, it is this node that can't be read
            raise CanonicalizeError(node, f"{node.format_node()}: {error}") from error
        raise CanonicalizeError(node, f"{node.op} nodes are not read")

    def _value(self, scope: Scope, node: Any, env: dict[tuple[Scope, fx.Node], Any]) -> Any:
        scope, node = resolve(scope, node)
        if not isinstance(node, fx.Node):
            return node
        if (scope, node) in env:
            return env[scope, node]
        if node not in self.leaves:
            raise CanonicalizeError(node, f"{node.name} carries no example value")
        return self.leaves[node]


def _indexes_by_scalars(args: Any) -> bool:
    """Indexing by 0-d integer tensors alone, as mask functions of flex_attention do."""
    indices = args[1] if isinstance(args[1], tuple) else (args[1],)
    return isinstance(args[0], Tensor) and all(
        isinstance(i, Tensor) and i.ndim == 0 and i.dtype is not torch.bool for i in indices
    )


def fixed(value: Any, numbers: Sequence[Any]) -> Any:
    """A value of a mask's computation. What a caller passed is fixed by a guard: the `numbers`, of which Dynamo makes
    symbols where they change between calls, and floats (dynamic=True)."""
    if not isinstance(value, torch.SymInt | torch.SymFloat):
        return value
    symbols = expression(value).free_symbols
    for number in numbers:
        if not symbols.isdisjoint(expression(number).free_symbols):
            guard_number(number)
    known = fixed_number(value)
    if isinstance(value, torch.SymInt):
        return value if known is None else int(known)
    counts = any(symbol.is_integer for symbol in symbols)  # T / 4 is another number for the row
    return value if hint(value) is None or (known is None and counts) else float(value)


def _storages(node: fx.Node) -> list[int]:
    tensors = [t for t in tree_leaves(node.meta.get("example_value")) if isinstance(t, Tensor)]
    return [memory_id(t) for t in tensors if not is_wrapped(t)]
