"""Private parts of Dynamo that say what the function does from which a graph is captured: the frame.

Read in torch 2.11 to 2.15, as those in `dynamo_internals.py`; tests are in `tests/passes/test_dynamo_internals.py`.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
import torch.fx as fx
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.source import LocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import SymNodeVariable, TensorVariable
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting, VariableTracker

from cp_rewrite.torch_internals import expression

from .dynamo_internals import source_name, source_of
from .regions import outputs_of


def break_reason(gm: fx.GraphModule) -> str | None:
    """The line where a graph ends before the function that it was captured from does, and why; None: it does not."""
    found = getattr(gm, "compile_subgraph_reason", None)
    if found is None or not found.graph_break:
        return None
    where = "".join(f"{frame.filename}:{frame.lineno}, `{frame.line}`: " for frame in found.user_stack[-1:])
    return where + str(found.reason).strip().partition("\n")[0]  # it goes on at length


def is_resumed() -> bool:
    """Whether the graph that is compiled now begins after a graph break."""
    translator = _translator()
    return translator is not None and TORCH_DYNAMO_RESUME_IN_PREFIX in translator.f_code.co_name


def wrapped_names() -> dict[str, str]:
    """What a decorator of a module's forward passes on by place, in the frame that is compiled now.

    def decorated(self, *args, **kwargs)      L['args'][0] -> hidden_states
    def forward(self, hidden_states, mask)    L['args'][1] -> mask
    """
    translator = _translator()
    code = getattr(translator, "f_code", None)
    if code is None or not code.co_argcount or not code.co_flags & inspect.CO_VARARGS:
        return {}
    method: Any = getattr(type(translator.f_locals.get(code.co_varnames[0])), "forward", None)
    while method is not None and getattr(method, "__code__", None) is not code:
        method = getattr(method, "__wrapped__", None)
    if method is None or not hasattr(method, "__wrapped__"):
        return {}
    rest = _rest(code, inspect.CO_VARARGS)
    names = [p.name for p in inspect.signature(method).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return {f"L['{rest}'][{i}]": name for i, name in enumerate(names[code.co_argcount :])}


def frame_call(replaced: Callable[[Any], Any]) -> tuple[Callable[..., Any], list[Any], dict[str, Any]] | None:
    """The function that is compiled now, and what `replaced` makes of its arguments; None outside of a backend.

    Its code is a copy, so that Dynamo notes nothing of a call for the code itself.
    """
    translator = _translator()
    if translator is None:
        return None
    code: CodeType = translator.f_code.replace()
    values: dict[str, Any] = replaced(dict(translator.f_locals))
    cells = tuple(CellType(values[name]) for name in code.co_freevars)
    function = FunctionType(code, translator.f_globals, code.co_name, None, cells)
    by_place, by_name = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    args = [values[name] for name in code.co_varnames[:by_place]]
    kwargs = {name: values[name] for name in code.co_varnames[by_place:by_name]}
    if (rest := _rest(code, inspect.CO_VARARGS)) is not None:
        args += values[rest]
    if (rest := _rest(code, inspect.CO_VARKEYWORDS)) is not None:
        kwargs |= values[rest]
    return function, args, kwargs


@dataclass(frozen=True)
class Ends:
    """Where tensors of a graph go beside the function's result.

    kept: nodes whose values outlive the call, assigned to attributes, globals and variables of outer functions, or put
    into lists, dicts and objects -> what keeps them. unread: those that nothing can read, as they are only put into
    the `**kwargs` of the call, which Python made for it.
    """

    kept: dict[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    unread: frozenset[fx.Node] = frozenset()


def ends_of(gm: fx.GraphModule) -> Ends:
    """Those of the graph that is compiled now."""
    translator = _translator()
    if translator is None:
        return Ends()
    effects, kept, own = translator.output.side_effects, dict[Any, str](), dict[Any, None]()
    live = _Live(gm)
    for holder, name, value in _writes(effects):
        source: Any = getattr(holder, "source", None)
        if isinstance(source, LocalSource) and source.local_name == _rest(translator.f_code, inspect.CO_VARKEYWORDS):
            own |= _values_in(effects, value, live)
            continue
        for node in _values_in(effects, value, live):
            kept.setdefault(node, f"{_where(holder)}.{name}" if name else _where(holder))
    unread: set[fx.Node] = set()
    if break_reason(gm) is None:
        returned = _values_in(effects, [*translator.stack], live)
        others = {x: _same(x.meta.get("example_value"), x) for x in outputs_of(gm) if isinstance(x, fx.Node)}
        unread = {x for x, value in others.items() if value in own and value not in returned and value not in kept}
        # What else the graph gives goes into something of a kind that is not walked here.
        kept |= {x: "something outside" for x, value in others.items() if value not in kept | returned | own}
    return Ends({node: where for node, where in kept.items() if isinstance(node, fx.Node)}, frozenset(unread))


def _where(holder: Any) -> str:
    # Not every holder has a source.
    source: Any = getattr(holder, "source", None)
    return "a global or outer variable" if source is None else source_name(source)


def _writes(effects: Any) -> Iterator[tuple[Any, str, Any]]:
    """(what was there before the call and is changed, attribute or "", new content)."""
    for holder, attributes in effects.store_attr_mutations.items():
        if isinstance(holder.mutation_type, AttributeMutationExisting):
            yield from ((holder, name, value) for name, value in attributes.items())
    for holder in effects.id_to_variable.values():
        if isinstance(holder.mutation_type, ValueMutationExisting) and holder.mutation_type.is_modified:
            yield holder, "", holder
        elif isinstance(holder.mutation_type, AttributeMutationExisting):  # of a class that is derived from dict, list
            contents = [part for part in vars(holder).values() if issubclass(type(part), VariableTracker)]
            yield from ((holder, "", part) for part in contents if _is_changed(part))


def _is_changed(part: Any) -> bool:
    return isinstance(part.mutation_type, ValueMutationExisting) and part.mutation_type.is_modified


class _Live:
    """Nodes of a graph by those that variables hold: Dynamo numbers a checkpoint's results anew, by new nodes with the
    old values, where not all are read."""

    def __init__(self, gm: fx.GraphModule) -> None:
        items = gm.graph.find_nodes(op="call_function", target=operator.getitem)
        self.by_value = {id(node.meta.get("example_value")): node for node in items}

    def node(self, variable: Any) -> fx.Node:
        node = variable.as_proxy().node
        return self.by_value.get(id(node.meta.get("example_value")), node) if node._erased else node


def _values_in(effects: Any, value: Any, live: _Live) -> dict[Any, None]:
    """The tensors, as their nodes, and numbers, as expressions, that can be reached from a value."""
    found: dict[Any, None] = {}
    for part in _parts_of(effects, value):
        # isinstance would make inputs of the graph of what nothing has read.
        if issubclass(type(part), TensorVariable):
            found[live.node(part)] = None
        elif issubclass(type(part), SymNodeVariable):
            found[_same(part.sym_num, part)] = None
    return found


def _parts_of(effects: Any, value: Any) -> list[Any]:
    """All that can be reached from a value through what the call made, in an order that all ranks have."""
    stored = {id(holder): [*attributes.values()] for holder, attributes in effects.store_attr_mutations.items()}
    found: list[Any] = []
    seen: dict[int, Any] = {}

    def note(part: Any) -> None:
        found.append(part)
        items = vars(part).get("items")
        keys = [getattr(key, "vt", None) for key in items] if isinstance(items, dict) else []
        VariableTracker.visit(note, [keys, stored.get(id(part), [])], seen)

    VariableTracker.visit(note, value, seen)
    return found


def _same(value: Any, other: Any) -> Any:
    """The expression of a number, which several nodes may give; `other` for other values."""
    return expression(value) if isinstance(value, torch.SymInt | torch.SymFloat) else other


def _rest(code: CodeType, kind: int) -> str | None:
    """The name of `*args` (CO_VARARGS) or `**kwargs` (CO_VARKEYWORDS) of a function."""
    if not code.co_flags & kind:
        return None
    after = kind == inspect.CO_VARKEYWORDS and bool(code.co_flags & inspect.CO_VARARGS)
    return code.co_varnames[code.co_argcount + code.co_kwonlyargcount + after]


@dataclass(frozen=True)
class Results:
    """What a function returns and keeps, as Dynamo makes it of a graph's results.

    tree: its containers, constants and what writes them, each by its kind and value. tensors: those in it, in order,
    each as its place among the graph's results, or by the name of the input that it is.
    """

    tree: tuple[Any, ...]
    tensors: tuple[int | str, ...]


def results_of(gm: fx.GraphModule) -> Results | None:
    """Those of the function whose graph is compiled now; None: they can't be told."""
    translator = _translator()
    if translator is None or break_reason(gm) is not None:
        return None
    effects, live = translator.output.side_effects, _Live(gm)
    places = {x: place for place, x in reversed([*enumerate(outputs_of(gm))])}
    roots = [("", "", [*translator.stack])]
    roots += [(_where(holder), name, value) for holder, name, value in _writes(effects)]
    tree: list[Any] = []
    tensors: list[int | str] = []
    for where, name, value in sorted(roots, key=lambda root: root[:2]):
        tree.append((where, name))
        for part in _parts_of(effects, value):
            tree.append(_kind(part))
            if issubclass(type(part), TensorVariable):
                node = live.node(part)
                source = source_of(node) or vars(part).get("source")  # inputs that nothing reads have no node left
                if node not in places and source is None:
                    return None
                tensors.append(places[node] if node in places else source_name(source))
    return Results(tuple(tree), tuple(tensors))


def _kind(part: Any) -> Any:
    """The kind of a value, where it was read, and the value of a constant."""
    held, items, source = vars(part).get("value"), vars(part).get("items"), vars(part).get("source")
    constant = isinstance(held, int | float | complex | str | bytes | slice | Enum | torch.dtype | torch.device)
    return (
        type(part).__name__,
        None if source is None else source_name(source),
        repr(held) if constant else type(held).__name__,
        getattr(vars(part).get("fn"), "__code__", None),
        len(items) if isinstance(items, list | tuple | dict) else None,
    )


def _translator() -> Any:
    """What translates the frame, while a backend runs; None outside of one."""
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:
        return None
