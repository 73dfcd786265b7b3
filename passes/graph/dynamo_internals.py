"""Private parts of Dynamo and of flex_attention that the passes use.

Read in torch 2.11 to 2.15, which agree in all of it unless a comment says otherwise. What is not Dynamo's is in
`torch_internals.py`; tests are in `tests/passes/test_dynamo_internals.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.source as dynamo
import torch.fx as fx
from torch import Tensor
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.source import LocalSource
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


def is_size(source: Any) -> bool:
    """Whether a source is a size or a stride of a tensor."""
    return isinstance(source, dynamo.TensorPropertySource)


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
