"""Private parts of Dynamo and of flex_attention that the passes use.

    source_of, is_of_module, …     where Dynamo read an input of a graph
    unwrapped                      errors that reach the caller as they are
    inner_mode, fake_input         fake tensors of the inner compiler
    FlexBlocks                     the parts of a block mask
    break_reason, frame_values,    the frame: what the function does from which a graph is captured
    ends_of, written_objects, …
    first_difference               where two graphs that Dynamo made differ

Read in torch 2.11 to 2.15, which agree in all of it unless a comment says otherwise. What is not Dynamo's is in
`torch_internals.py`; tests are in `tests/passes/test_dynamo_internals.py`.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
import torch._dynamo.source as dynamo
import torch.fx as fx
from torch import Tensor
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.source import LocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import SymNodeVariable, TensorVariable
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting, VariableTracker
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves

from cp_rewrite.refusal import RewriteRefused
from cp_rewrite.torch_internals import FakeTensorMode, expression

from .nodes import attribute_of, outputs_of

# -- where Dynamo read an input ----------------------------------------------------------------------------

_OF_MODULES = frozenset(
    {
        dynamo.NNModuleSource,
        dynamo.UnspecializedNNModuleSource,
        dynamo.UnspecializedBuiltinNNModuleSource,
        dynamo.FSDPNNModuleSource,
        dynamo.ParamBufferSource,
        dynamo.UnspecializedParamBufferSource,
    }
)
"""Dynamo wraps in these what it reads off a module: weights, buffers, attributes."""

_OTHERS = frozenset(
    vars(dynamo).get(f"{kind}Source")
    for kind in (
        "AttrProxy Attr BackwardState CallFunctionNoArgs CallMethodItem CellContents Closure Code ConstDictKey "
        "Constant ContextVarGet ConvertInt CurrentStream DataclassFields Defaults DictGetItem DictSubclassGetItem "
        "DynamicScalar Ephemeral FlattenScriptObject FloatTensor GenericAttr GetItem GlobalState Global "
        "GlobalWeakRef Grad Import Indexed ListGetItem ListReverseIteratorBackingList LocalCell Local "
        "NamedTupleFields Negate NonSerializableSetGetItem NumpyTensor Optimizer RandomValue "
        "ScriptObjectQualifiedName ShapeEnv SkipGuard SubclassAttrList SyntheticLocal TempLocal TensorProperty "
        "TorchFunctionModeStack TupleIteratorGetItem TypeDict TypeMRO Type UnwrapCollectiveTensor WeakRefCall"
    ).split()
)
"""Arguments, parts of them, and what else is no module's. With those above: every kind of source that there is, some
in newer versions of torch only."""


def source_of(placeholder: fx.Node) -> Any:
    """Where Dynamo read an input of the graph; None: nowhere, as for inputs of a nested region."""
    source = getattr(placeholder, "_dynamo_source", None) or getattr(placeholder.meta.get("grapharg"), "source", None)
    return source if source is not None else placeholder.meta.get("dynamo_source")


def source_name(source: Any) -> str:
    """The Python expression of a source, as in `L['batch'].doc_ids`: a method up to torch 2.11, a property later."""
    return str(source.name() if callable(source.name) else source.name)


def is_of_module(source: Any) -> bool:
    """True if a source is read off a module, and so is no argument.

    Raises:
        TypeError: the kind of source is unknown: taken for an argument's, it could make arguments of weights.
    """
    kinds = [type(link) for link in _chain(source)]
    for kind in kinds:
        if kind not in _OF_MODULES and kind not in _OTHERS:
            raise TypeError(
                f"cp_rewrite does not know the source {kind.__name__} of {source_name(source)} in torch "
                f"{torch.__version__}, and can't tell whether it is an argument: say in {__name__} what it is"
            )
    return not _OF_MODULES.isdisjoint(kinds)


def is_size(source: Any) -> bool:
    """True if a source is a size or a stride of a tensor."""
    return isinstance(source, dynamo.TensorPropertySource)


def input_value(placeholder: fx.Node) -> Any:
    """The very object that an input of the graph is, while a backend runs; None outside of one."""
    return getattr(placeholder.meta.get("grapharg"), "example", None)


def is_random_number(placeholder: fx.Node) -> bool:
    """True if an input is a number that Python's `random` draws when the function is called."""
    return any(isinstance(link, dynamo.RandomValueSource) for link in _chain(source_of(placeholder)))


def _chain(source: Any) -> Iterator[Any]:
    """A source, what it is a part of, and so on."""
    while source is not None:
        yield source
        source = getattr(source, "base", None)


# -- errors of a backend -----------------------------------------------------------------------------------


class _Unwrapped(ShortenTraceback):
    """Dynamo hands this to its caller as it is, with a text of its own at the end, which `str` leaves out."""

    def __init__(self, error: Exception, frame: Any) -> None:
        super().__init__(*_arguments(error), first_useful_frame=frame)
        self.error = error

    def __str__(self) -> str:
        return str(self.error)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self.error), _arguments(self.error)


def _arguments(error: Exception) -> tuple[Any, ...]:
    """The arguments that an error is made of."""
    made: Any = error.__reduce__()
    return made[1]


_UNWRAPPED: dict[Any, Any] = {
    kind: type(kind.__name__, (_Unwrapped, kind), {"__module__": kind.__module__})
    for kind in (RuntimeError, TypeError, ValueError, RewriteRefused)
}


def unwrapped(error: Exception) -> Exception:
    """An error to be raised in a backend's first function instead of `error`: it has the same kind, and reaches the
    caller of the compiled function as it is, where others come inside of a BackendCompilerFailed.

    Nothing is kept of the failed compilation: a later call compiles anew. An error at the first run instead would pass
    through handlers of modules around the graph, as torch.export's have, and Dynamo would fail over these.
    """
    kind, here = _UNWRAPPED.get(type(error)), inspect.currentframe()
    if kind is None or here is None:
        return error
    return kind(error, here.f_back).with_traceback(error.__traceback__)


# -- inputs for the graph that the inner compiler gets -----------------------------------------------------


def inner_mode(mode: FakeTensorMode) -> FakeTensorMode:
    """The mode of the inner compiler's example inputs, which shares the symbols of `mode`, that of the graph's tensors.

    While a backend runs, Dynamo's tracing context holds it; outside of one, as in a dry run, both are the same.
    """
    context = TracingContext.try_get()
    return mode if context is None or context.fake_mode is None else context.fake_mode


def fake_input(mode: FakeTensorMode, tensor: Tensor, name: str, dynamic: Sequence[bool]) -> Tensor:
    """A fake tensor for an argument called `name`, with a symbol of its own for each dim that is `dynamic`."""
    sizes = [DimDynamic.DYNAMIC if free else DimDynamic.STATIC for free in dynamic]
    symbols = StatelessSymbolicContext(dynamic_sizes=sizes)  # type: ignore[call-arg]
    return mode.from_tensor(tensor, source=LocalSource(name), symbolic_context=symbols)


# -- flex_attention ----------------------------------------------------------------------------------------

FLEX_OPERANDS = (
    "query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options", "score_mod_other_buffers",
    "mask_mod_other_buffers",
)  # fmt: skip
"""Operands of the higher-order op, in order."""


@dataclass(frozen=True)
class FlexBlocks:
    """The parts of a block mask that decide what is seen, read off its tuple:

        q_len  kv_len  counts  indices  full counts  full indices  …  block of queries  block of keys  mask function

    Args:
        lists: nodes of the counts and indices of the blocks that the mask function decides in, and of those, where
            there are any, that are seen whole.
        size: of a block, in queries and keys.
        mask_mod: the node of the mask function's body.
    """

    lists: tuple[fx.Node, ...]
    size: tuple[int, int]
    mask_mod: fx.Node

    @staticmethod
    def read(block_mask: Sequence[Any]) -> FlexBlocks:
        # Versions differ in what stands between the lists and the block size.
        lists = tuple(x for x in block_mask[2:6] if x is not None)
        return FlexBlocks(lists, (block_mask[-3], block_mask[-2]), block_mask[-1])


def break_reason(gm: fx.GraphModule) -> str | None:
    """The line where a graph ends before the function that it was captured from does, and why; None: it does not."""
    found = getattr(gm, "compile_subgraph_reason", None)
    if found is None or not found.graph_break:
        return None
    where = "".join(f"{frame.filename}:{frame.lineno}, `{frame.line}`: " for frame in found.user_stack[-1:])
    return where + str(found.reason).strip().partition("\n")[0]  # it goes on at length


def is_resumed() -> bool:
    """True if the graph that is compiled now begins after a graph break."""
    translator = _translator()
    return translator is not None and TORCH_DYNAMO_RESUME_IN_PREFIX in translator.f_code.co_name


def wrapped_names() -> dict[str, str]:
    """Sources of what a decorator of a module's forward passes on by place, in the frame that is compiled now -> names.

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


def frame_values() -> list[Any]:
    """The arguments of the function that is compiled now, those in its `*args` and `**kwargs` too, and what it reads of
    outer functions; none outside of a backend."""
    translator = _translator()
    if translator is None:
        return []
    code, values = translator.f_code, dict[str, Any](translator.f_locals)
    several = [values.pop(name) for kind in _SEVERAL if (name := _rest(code, kind)) is not None]
    return [*values.values(), *(x for rest in several for x in (rest.values() if isinstance(rest, dict) else rest))]


_SEVERAL = (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)


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
    """The Ends of the graph that is compiled now."""
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


def _translator() -> Any:
    """Dynamo's translator of the frame, while a backend runs; None outside of one."""
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:
        return None


def written_objects() -> list[str]:
    """Names of Python's objects that the frame which is compiled now was given and writes into; none outside of one."""
    translator = _translator()
    return [] if translator is None else [source.name for source in translator.output.side_effects.mutated_sources]


def known_objects() -> dict[int, bool]:
    """By `id`, the objects of Python that the frame which is compiled now was given, and whether it writes into them;
    none outside of one."""
    if (translator := _translator()) is None:
        return {}
    effects = translator.output.side_effects
    written = {id(holder) for holder, *_ in _writes(effects)}
    return {key: id(variable) in written for key, variable in effects.id_to_variable.items()}


Same = Callable[[Any, Any], bool]
"""Tells if two numbers are the same, of which one, or both, may be made of sizes."""


def first_difference(ours: fx.GraphModule, other: fx.GraphModule, same: Same) -> fx.Node | None:
    """The first node of `ours` that `other` computes otherwise; None: both are the same.

    Nodes that give numbers are not compared, but those that read them are.
    """
    pairs: dict[fx.Node, fx.Node] = {}

    def alike(a: Any, b: Any) -> bool:
        a, b = _number(a), _number(b)
        if isinstance(a, fx.Node):
            return pairs.get(a) is b
        if isinstance(a, list | tuple):
            return isinstance(b, list | tuple) and len(a) == len(b) and all(map(alike, a, b))
        if isinstance(a, dict):
            return isinstance(b, dict) and [*a] == [*b] and all(alike(a[key], b[key]) for key in a)
        if isinstance(a, slice):
            return isinstance(b, slice) and alike((a.start, a.stop, a.step), (b.start, b.stop, b.step))
        if isinstance(a, _SYMBOLIC) or isinstance(b, _SYMBOLIC):
            return all(isinstance(x, int | float | _SYMBOLIC) for x in (a, b)) and same(a, b)
        return type(a) is type(b) and bool(a == b)

    theirs = [node for node in other.graph.nodes if _number(node) is node]
    for place, node in enumerate(node for node in ours.graph.nodes if _number(node) is node):
        like = theirs[place] if place < len(theirs) else None
        if like is None or node.op != like.op or not _same_target(node, like, same):
            return node
        if not alike((node.args, node.kwargs), (like.args, like.kwargs)):
            return node
        pairs[node] = like
    return None if len(theirs) == len(pairs) else next(reversed(pairs))


_SYMBOLIC = torch.SymInt | torch.SymFloat | torch.SymBool


def _number(value: Any) -> Any:
    """The numbers that a node gives; of another node, or no node, what was given."""
    if not isinstance(value, fx.Node):
        return value
    leaves = tree_leaves(given := value.meta.get("example_value"))
    return given if leaves and all(isinstance(leaf, int | float | _SYMBOLIC) for leaf in leaves) else value


def _same_target(ours: fx.Node, other: fx.Node, same: Same) -> bool:
    if ours.op == "placeholder":
        sources = source_of(ours), source_of(other)
        return sources == (None, None) or (None not in sources and len({*map(source_name, sources)}) == 1)
    if ours.op != "get_attr":
        return ours.target == other.target
    a, b = attribute_of(ours), attribute_of(other)
    if isinstance(a, fx.GraphModule) and isinstance(b, fx.GraphModule):
        return first_difference(a, b, same) is None
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape:
        return a is b or torch.equal(a, b)
    return a is b
