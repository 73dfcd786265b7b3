"""Private parts of Dynamo are still what the source takes them for: tests/test_torch_internals.py has the others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.source as dynamo
import torch.fx as fx
from torch import Tensor, nn
from torch._guards import Source
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from cp_rewrite import torch_internals as ours
from cp_rewrite.passes.graph import dynamo as dynamo_frame
from cp_rewrite.passes.graph.nodes import REGION_OPS, nested_graphs, region_call
from cp_rewrite.passes.graph.tokens import argument_names, module_numbers
from tests.helpers.canary import canary, captured, tensors_of


class Model(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Everything that Dynamo reads off a module, and arguments of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.layers = nn.ModuleList([nn.Linear(3, 3)])
        self.register_buffer("table", torch.ones(3))
        self.plain = torch.ones(3)
        self.heads = 5

    def forward(self, x: Tensor, packed: dict[str, Tensor], *rest: Tensor) -> Tensor:
        y = self.layers[0](self.norm(x)) * self.table * self.plain  # pyright: ignore[reportOperatorIssue]
        return y * self.heads + packed["ids"] + rest[0] + OUTSIDE


OUTSIDE = torch.ones(3)


@canary("the sources of placeholders", "dynamo_internals.source_of, source_name and is_of_module, for argument names")
def test_sources_of_arguments_and_of_modules() -> None:
    x = torch.ones(2, 3)
    gm = captured(Model(), x, {"ids": x + 1}, x + 2)
    sources = [dynamo_frame.source_of(node) for node in tensors_of(gm)]
    assert None not in sources
    names = {dynamo_frame.source_name(s): dynamo_frame.is_of_module(s) for s in sources}
    assert [name for name, of_module in names.items() if not of_module] == [
        "L['x']",
        "L['packed']['ids']",
        "L['rest'][0]",
        "G['OUTSIDE']",
    ]
    assert len(names) == len(sources) == 10  # the others: two weights of two layers, a buffer, a plain tensor
    assert sorted(argument_names(gm).values()) == ["OUTSIDE", "ids", "rest[0]", "x"]


def decorated(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def run(self: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return forward(self, *args, **kwargs)

    return run


class Decorated(nn.Module):
    """As layers of `transformers` from 5.23."""

    @decorated
    def forward(self, x: Tensor, mask: Tensor, *, scale: Tensor) -> Tensor:
        return x * mask * scale


@canary("the frame that is compiled", "dynamo_frame.wrapped_names, for names of arguments behind a decorator")
def test_arguments_behind_a_decorator() -> None:
    names: list[str] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        names.extend(argument_names(gm).values())
        return gm.forward

    torch._dynamo.reset()
    x = torch.ones(2, 3)
    torch.compile(Decorated(), backend=backend, fullgraph=True)(x, x + 1, scale=x + 2)
    assert names == ["x", "mask", "scale"]


@canary("the objects behind placeholders", "dynamo_internals.input_value, for weights that FSDP shards")
def test_input_value() -> None:
    model, found = Model(), dict[int, str]()

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        found.update({id(dynamo_frame.input_value(node)): node.name for node in tensors_of(gm)})
        return gm.forward

    torch._dynamo.reset()
    x = torch.ones(2, 3)
    torch.compile(model, backend=backend, fullgraph=True)(x, {"ids": x + 1}, x + 2)
    assert all("weight" in found[id(layer.weight)] for layer in model.layers)
    assert id(x) in found


@canary("the sources of numbers that a module holds", "argument_names.module_numbers")
def test_sources_of_a_modules_numbers() -> None:
    model = Model()
    torch._dynamo.reset()
    found: list[int] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        found.append(len(module_numbers(gm)))
        return gm.forward

    compiled = torch.compile(model, backend=backend, dynamic=True)
    x = torch.ones(2, 3)
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        compiled(x, {"ids": x}, x)
    assert found == [1]


def test_every_kind_of_source_is_known() -> None:
    kinds = {kind for kind in vars(dynamo).values() if isinstance(kind, type) and issubclass(kind, Source)}
    known = dynamo_frame._OF_MODULES | dynamo_frame._OTHERS
    new = sorted(kind.__name__ for kind in kinds - known if kind.__module__ == dynamo.__name__)
    assert not new, (
        f"torch {torch.__version__} has new kinds of sources, {new}: say in passes/graph/dynamo.py whether "
        "what they are read off is a module; is_of_module relies on it"
    )


def test_an_unknown_kind_of_source_is_an_error_that_names_it() -> None:
    class NewSource(dynamo.AttrSource):  # pyright: ignore[reportUntypedBaseClass]
        pass

    source = dynamo.GetItemSource(NewSource(dynamo.LocalSource("self"), "weight"), 0)
    with pytest.raises(TypeError, match=r"does not know the source NewSource of L\['self'\].weight\[0\]"):
        dynamo_frame.is_of_module(source)


@canary("graph breaks: compile_subgraph_reason, names of resumed functions", "dynamo_frame.break_reason, is_resumed")
def test_graph_breaks() -> None:
    seen: list[tuple[str | None, bool]] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        seen.append((dynamo_frame.break_reason(gm), dynamo_frame.is_resumed()))
        return gm.forward

    def model(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(torch.ones(3))
    (broken, first), (whole, second) = seen
    assert broken is not None
    assert "torch._dynamo.graph_break()" in broken
    assert [first, whole, second] == [False, None, True]
    assert not dynamo_frame.is_resumed()


@canary("exc.ShortenTraceback, which Dynamo does not wrap", "dynamo_internals.unwrapped, for errors of the backend")
def test_errors_of_a_backend() -> None:
    def backend(gm: fx.GraphModule, _: Any) -> Any:
        try:
            raise ValueError("no graph")
        except ValueError as error:
            raise dynamo_frame.unwrapped(error) from None

    torch._dynamo.reset()
    with pytest.raises(ValueError, match=r"^no graph$"):
        torch.compile(torch.neg, backend=backend)(torch.ones(3))
    other = KeyError("x")
    assert dynamo_frame.unwrapped(other) is other


@canary("side effects: SideEffects.store_attr_mutations, id_to_variable", "dynamo_frame.ends_of")
def test_values_that_outlive_a_call() -> None:
    seen: list[str] = []
    bag: list[Tensor] = []

    class Keeper(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
        def forward(self, x: Tensor, **rest: Tensor) -> Tensor:
            self.load = x.sum()
            bag.append(x * 2)
            rest["y"] = x.sin()
            fresh = [x * 3]
            return x + fresh[0]

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        ends = dynamo_frame.ends_of(gm)
        seen.extend(f"{node.name}: {where}" for node, where in ends.kept.items())
        seen.extend(node.name for node in ends.unread)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(Keeper(), backend=backend, fullgraph=True)(torch.ones(3))
    assert sorted(seen) == ["mul: L['bag']", "sin", "sum_1: L['self'].load"]
    assert not dynamo_frame.ends_of(fx.symbolic_trace(lambda x: x)).kept


@canary("TracingContext or FakeTensorMode.from_tensor", "dynamo_internals.inner_mode and fake_input, for plan inputs")
def test_inputs_of_the_inner_compiler() -> None:
    sizes: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        mode = ours.fake_mode_of(gm.graph.nodes)
        assert mode is not None
        inner = dynamo_frame.inner_mode(mode)
        assert inner is not mode
        assert inner.shape_env is mode.shape_env
        assert all(value.fake_mode is inner for value in inputs if isinstance(value, ours.FakeTensor))
        fake = dynamo_frame.fake_input(inner, torch.ones(5, 3), "cp_table", [True, False])
        assert isinstance(fake, ours.FakeTensor)
        sizes.extend([*fake.shape, ours.hint(fake.shape[0])])
        return gm.forward

    torch._dynamo.reset()
    torch.compile(torch.sin, backend=backend)(torch.ones(4))
    assert isinstance(sizes[0], torch.SymInt)
    assert sizes[1:] == [3, 5]
    mode = ours.FakeTensorMode()
    assert dynamo_frame.inner_mode(mode) is mode


@canary("the frame that Dynamo translates", "dynamo_frame.frame_values")
def test_the_arguments_of_a_function_are_known_while_it_is_traced() -> None:
    seen: list[Any] = []
    outer = nn.Linear(2, 2)

    def function(x: Tensor, *more: Any, y: Tensor, **others: Any) -> Tensor:
        return outer(x) + y + others["z"] + more[0] * more[1]

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        seen.extend(dynamo_frame.frame_values())
        return gm.forward

    torch._dynamo.reset()
    given = [torch.full((2,), float(i)) for i in range(4)]
    torch.compile(function, backend=backend)(given[0], given[1], 3.0, y=given[2], z=given[3])
    assert all(any(value is known for known in seen) for value in (*given, outer))
    assert 3.0 in [value for value in seen if isinstance(value, float)]
    assert len(seen) == 6
    assert dynamo_frame.frame_values() == []


# -- higher-order ops --------------------------------------------------------------------------------------


@canary("the operands of flex_attention", "dynamo_internals.FLEX_OPERANDS, for match.flex")
def test_flex_operands() -> None:
    op = torch.ops.higher_order.flex_attention
    assert tuple(inspect.signature(type(op).__call__).parameters)[1:] == dynamo_frame.FLEX_OPERANDS


@canary("BlockMask.as_tuple", "dynamo_internals.FlexBlocks, for match.flex")
def test_flex_blocks() -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, "cpu", BLOCK_SIZE=(64, 128))
    found: Any = dynamo_frame.FlexBlocks.read(mask.as_tuple())
    assert found.lists[0] is mask.kv_num_blocks
    assert found.lists[1] is mask.kv_indices
    assert found.lists[2] is mask.full_kv_num_blocks
    assert found.lists[3] is mask.full_kv_indices
    assert found.size == (64, 128)
    assert found.mask_mod is mask.mask_mod


@canary("higher-order ops that run a body once", "regions.region_call")
def test_region_ops() -> None:
    for name in REGION_OPS:
        op = getattr(torch.ops.higher_order, name)
        assert isinstance(op, ours.HigherOrderOperator)
        assert op.name() == name
    region: Any = torch.compiler.nested_compile_region(lambda x, y: x * y)

    def model(x: Tensor, y: Tensor) -> Any:
        return checkpoint(lambda a, b: a + b, region(region(x, y), y), y, use_reentrant=False)

    gm = captured(model, torch.ones(3), torch.ones(3))
    calls = [region_call(node) for node in gm.graph.nodes if nested_graphs(node)]
    assert [None if call is None else call.node.target.name() for call in calls] == [  # type: ignore[union-attr]
        "invoke_subgraph",
        "invoke_subgraph",
        "tag_activation_checkpoint",
    ]
    assert all(call is not None and len(call.operands) == 2 for call in calls)
