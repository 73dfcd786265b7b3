"""Private parts of Dynamo and of flex_attention that the passes use.

Read in torch 2.11 to 2.15, which agree in all of it unless a comment says otherwise. What is not Dynamo's is in
`torch_internals.py`; tests are in `tests/passes/test_dynamo_internals.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
import torch._dynamo.source as dynamo
import torch.fx as fx
from torch import Tensor
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
from torch._dynamo.source import LocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting, VariableTracker
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from cp_rewrite.refusal import RewriteRefused
from cp_rewrite.torch_internals import FakeTensorMode

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
    """Whether a source is read off a module, and so is no argument.

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


def input_value(placeholder: fx.Node) -> Any:
    """The very object that an input of the graph is, while a backend runs; None outside of one."""
    return getattr(placeholder.meta.get("grapharg"), "example", None)


def is_random_number(placeholder: fx.Node) -> bool:
    """Whether an input is a number that Python's `random` draws when the function is called."""
    return any(isinstance(link, dynamo.RandomValueSource) for link in _chain(source_of(placeholder)))


def _chain(source: Any) -> Iterator[Any]:
    """A source, what it is a part of, and so on."""
    while source is not None:
        yield source
        source = getattr(source, "base", None)


# -- the frame that a graph is of ----------------------------------------------------------------------------


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
    rest = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
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
    rest = iter(code.co_varnames[by_name:])
    if code.co_flags & inspect.CO_VARARGS:
        args += values[next(rest)]
    if code.co_flags & inspect.CO_VARKEYWORDS:
        kwargs |= values[next(rest)]
    return function, args, kwargs


def kept_values() -> dict[fx.Node, str]:
    """Nodes of the graph that is compiled now whose values outlive the call by another way than its result: assigned to
    attributes, globals and variables of outer functions, or put into lists and dicts. -> what keeps them."""
    translator = _translator()
    effects = None if translator is None else translator.output.side_effects
    found: dict[fx.Node, str] = {}
    for holder, name, value in () if effects is None else _writes(effects):

        def note(part: Any, holder: Any = holder, name: str = name) -> None:
            # isinstance would make inputs of the graph of what nothing has read.
            if issubclass(type(part), TensorVariable):
                # Not of every holder: torch's own stack of modes has a source without a name.
                source = getattr(holder, "source", None)
                where = "a global or outer variable" if source is None else source_name(source)
                found.setdefault(part.as_proxy().node, f"{where}.{name}" if name else where)

        VariableTracker.visit(note, value)
    return found


def _writes(effects: Any) -> Iterator[tuple[Any, str, Any]]:
    """(what was there before the call and is changed, attribute or "", new content)."""
    for holder, attributes in effects.store_attr_mutations.items():
        if isinstance(holder.mutation_type, AttributeMutationExisting):
            yield from ((holder, name, value) for name, value in attributes.items())
    for holder in effects.id_to_variable.values():
        if isinstance(holder.mutation_type, ValueMutationExisting) and holder.mutation_type.is_modified:
            yield holder, "", holder


def _translator() -> Any:
    """What translates the frame, while a backend runs; None outside of one."""
    try:
        return InstructionTranslator.current_tx()
    except AttributeError:
        return None


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
    """What an error is made of."""
    made: Any = error.__reduce__()
    return made[1]


_UNWRAPPED: dict[Any, Any] = {
    kind: type(kind.__name__, (_Unwrapped, kind), {}) for kind in (RuntimeError, TypeError, ValueError, RewriteRefused)
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
