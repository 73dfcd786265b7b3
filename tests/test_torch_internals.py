"""Private parts of torch are still what the source takes them for. Each test says what broke and who depends on it."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
from collections import UserDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.source as dynamo
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor, nn
from torch._guards import Source
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from cp_rewrite import torch_internals as ours
from cp_rewrite.passes.graph import dynamo_internals
from cp_rewrite.passes.graph.argument_names import argument_names, module_numbers
from cp_rewrite.passes.graph.new_nodes import traced
from cp_rewrite.passes.graph.regions import REGION_OPS, nested_graphs, region_call
from cp_rewrite.passes.graph.traced_again import traced_again
from tests.test_rooms import SOURCES


def canary(theirs: str, dependent: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Whatever goes wrong in a test: it is said to be `theirs`, a part of torch, on which `dependent`, ours, relies."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                test(*args, **kwargs)
            except Exception as error:
                raise AssertionError(f"torch {torch.__version__} changed {theirs}; {dependent} relies on it") from error

        return run

    return decorate


USED = {
    "torch._C._nn.scaled_dot_product_attention": "match.find_sites.is_sdpa",
    "torch._dynamo.backends.registry.lookup_backend": "backend.Backend",
    "torch._dynamo.backends.registry.register_backend": "backend.compile_backend",
    "torch._dynamo.maybe_mark_dynamic": "batch.shard.shard",
    "torch._dynamo.utils.counters": "observe.count",
    "torch._logging.trace_structured": "observe.trace",
    "torch.amp.autocast_mode._enter_autocast": "locality.run.NodeRunner.toggle",
    "torch.amp.autocast_mode._exit_autocast": "locality.run.NodeRunner.toggle",
    "torch.distributed._functional_collectives": "ops.scatter_heads, for the gradients of collectives",
    "torch.distributed._symmetric_memory.empty": "kernels.peers, for memory that GPUs share",
    "torch.distributed._symmetric_memory.rendezvous": "kernels.peers, for memory that GPUs share",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.ignore_fresh_unbacked_symbols": "canonicalize and graph.new_nodes",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.suppress_guards": "graph.new_nodes.tracing",
    "torch.ops._c10d_functional.all_gather_into_tensor.default": "ops.all_gather",
    "torch.ops._c10d_functional.all_to_all_single.default": "ops.scatter_heads",
    "torch.ops._c10d_functional.reduce_scatter_tensor.default": "ops.all_gather",
    "torch.ops.aten._flash_attention_backward.default": "kernels.flash.aten_flash",
    "torch.ops.aten._flash_attention_forward.default": "kernels.flash.aten_flash",
}
"""Used as they are: what is private in torch -> who uses it."""


@pytest.mark.parametrize("path", USED)
def test_what_is_used_as_it_is_is_there(path: str) -> None:
    module, _, name = path.rpartition(".")
    try:
        assert hasattr(pkgutil.resolve_name(module), name) or importlib.import_module(path)
    except (ImportError, AttributeError):
        raise AssertionError(f"torch {torch.__version__} has no {path}; {USED[path]} relies on it") from None


def private_imports(file: Path) -> list[str]:
    """What a file imports from torch that is private by its name."""
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [path for path in found if path.startswith("torch.") and "._" in path]


def test_private_parts_are_imported_by_two_files() -> None:
    """All others take them from there, or use what has a test above."""
    known = (*USED, "torch.utils._pytree")
    new = [
        f"{module}: {path}"
        for module, file in SOURCES.items()
        for path in private_imports(file)
        if file.name not in ("torch_internals.py", "dynamo_internals.py")
        and not any(name.startswith(path) or path.startswith(name) for name in known)
    ]
    assert not new, f"wrap these in torch_internals.py, with a test: {new}"


# -- fake tensors and memory -------------------------------------------------------------------------------


@canary("FakeTensor.fake_mode", "torch_internals.fake_mode_of")
def test_fake_mode_of() -> None:
    mode = ours.FakeTensorMode()
    node = fx.Graph().placeholder("x")
    assert ours.fake_mode_of([node]) is None
    node.meta["example_value"] = mode.from_tensor(torch.ones(2))
    assert ours.fake_mode_of([node]) is mode


@canary("FakeTensor.constant or _disable_current_modes", "torch_internals.known_number, by which masks know numbers")
def test_known_number() -> None:
    assert ours.known_number(torch.tensor(3)) == 3
    assert ours.known_number(torch.ones(2)) is None
    with ours.FakeTensorMode():
        assert ours.known_number(torch.tensor(3)) == 3
        assert ours.known_number(torch.ones(1)) is None


@canary("how fake tensors remember that they stand for a parameter", "torch_internals.is_parameter")
def test_is_parameter() -> None:
    weight = nn.Parameter(torch.ones(2))
    fake = ours.FakeTensorMode().from_tensor(weight)
    assert ours.is_parameter(weight)
    assert ours.is_parameter(fake)
    assert not ours.is_parameter(torch.ones(2))


@canary("UntypedStorage._cdata", "torch_internals.memory_id, by which writes are seen")
def test_memory_id() -> None:
    for mode in (ours.FakeTensorMode(), torch.no_grad()):
        with mode:
            x = torch.ones(4)
            assert ours.memory_id(x) == ours.memory_id(x[1:])
            assert ours.memory_id(x) != ours.memory_id(x.clone())


@canary("which op overloads the dispatcher falls apart into", "locality.run and canonicalize")
def test_ops_that_are_called_directly() -> None:
    """`ops/attention.py`, `ops/pushed/attention.py`."""
    callers: list[str] = []

    @torch.library.custom_op("cp_rewrite_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        callers.append(inspect.stack()[1].function)
        return 2 * x

    twice.register_autograd(lambda ctx, grad: 2 * grad)
    x = torch.ones(3, requires_grad=True)
    twice(x)
    ours.call_directly(twice, "cpu")
    y = twice(x)
    y.sum().backward()
    assert torch.equal(y, 2 * x)
    assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]
    assert callers[0] != callers[1]

    seen: list[Any] = []

    class Watch(ours.TorchDispatchMode):  # pyright: ignore[reportUntypedBaseClass]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    twice.register_fake(torch.empty_like)
    with torch.no_grad():
        assert not twice(x).requires_grad
        assert callers.pop() == "run"
        with Watch():  # modes and traces see the op all the same
            twice(x)
        assert torch.ops.cp_rewrite_test.twice.default in seen
        calls = len(callers)
        with ours.FakeTensorMode() as mode:
            assert isinstance(twice(mode.from_tensor(x)), ours.FakeTensor)
        traced = make_fx(twice, tracing_mode="fake")(x)
        assert len(callers) == calls
        assert torch.ops.cp_rewrite_test.twice.default in [node.target for node in traced.graph.nodes]
        assert torch.equal(traced(x), 2 * x)
    for name in ("packed_attention", "pushed_attention_backward"):
        for key in ("CUDA", "AutogradCUDA"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"cp_rewrite::{name}", key)


def test_raw_stream() -> None:
    """`kernels/cuda.py`."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert ours.raw_stream(0) == torch.cuda.current_stream(0).cuda_stream


def test_enable_python_dispatcher() -> None:
    seen: list[Any] = []

    class Watch(ours.TorchDispatchMode):  # pyright: ignore[reportUntypedBaseClass]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with ours.FakeTensorMode(), ours.enable_python_dispatcher(), Watch():
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3))
    assert torch.ops.aten.mm.default in seen
    assert all(isinstance(func, ours.OpOverload) for func in seen)


@canary("make_fx, which leaves detach out unless a table is given (2.15)", "graph.new_nodes.traced, for gradients")
def test_detach_is_traced() -> None:
    x = ours.FakeTensorMode().from_tensor(torch.ones(3))
    module = traced(lambda x: x.detach() * x, [x], x.fake_mode)
    assert module.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default)


# -- functorch ---------------------------------------------------------------------------------------------


@canary("torch._C._functorch's wrappers", "torch_internals.is_wrapped, unwrapped, transform_depth")
def test_wrapped_tensors() -> None:
    outside = torch.ones(2, 3)
    depths: list[int] = []

    def row(x: Tensor) -> Tensor:
        assert ours.is_wrapped(x)
        assert ours.unwrapped(x) is not x
        assert ours.memory_id(ours.unwrapped(x)) == ours.memory_id(outside)
        depths.append(ours.transform_depth())
        return x

    assert not ours.is_wrapped(outside)
    torch.vmap(row)(outside)
    torch.vmap(torch.vmap(row))(outside)
    assert [ours.transform_depth(), *depths] == [0, 1, 2]


@canary("torch._C._functorch._vmap_decrement_nesting", "torch_internals.leave_vmaps")
def test_leave_vmaps() -> None:
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    functorch._vmap_increment_nesting(2, "error")
    assert ours.transform_depth() == 1
    ours.leave_vmaps(0)
    assert ours.transform_depth() == 0


@canary("what Dynamo writes into graphs for vmap and grad", "torch_internals.is_transform")
def test_is_transform() -> None:
    gm = captured(lambda x: torch.vmap(torch.sin)(x) + torch.func.grad(lambda y: y.sum())(x), torch.ones(2, 3))
    names = {str(getattr(n.target, "__name__", n.target)) for n in gm.graph.nodes if ours.is_transform(n.target)}
    assert {"_vmap_increment_nesting", "_vmap_decrement_nesting", "_grad_increment_nesting"} <= names
    assert not ours.is_transform(torch.sin)


# -- symbolic sizes ----------------------------------------------------------------------------------------


@canary("SymInt.node", "torch_internals.expression, hint and fixed_number")
def test_symbolic_sizes() -> None:
    gm = captured(lambda x, y: x * 2 + y[:4].sum(), torch.ones(6), torch.ones(8), dynamic=(0, 1))
    x, y = (node.meta["example_value"].shape[0] for node in tensors_of(gm))
    assert ours.expression(x).is_Symbol
    assert ours.expression(7) == 7
    assert [ours.hint(x), ours.hint(x + y), ours.hint(7)] == [6, 14, 7]
    assert ours.fixed_number(x) is None
    assert bool(x == 6)
    assert ours.fixed_number(x) == 6.0
    assert ours.expression(x) == 6


@canary("ShapeEnv.guards, replace, evaluate_expr and backed_var_to_val", "torch_internals.guards_of, simplified, guard")
def test_guards() -> None:
    def model(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 4 else x

    gm = captured(model, torch.ones(6), dynamic=(0,))
    (node,) = tensors_of(gm)
    size = node.meta["example_value"].shape[0]
    env = size.node.shape_env
    where = next(line for condition, line in ours.guards_of(env) if ours.expression(size) in condition.free_symbols)
    assert Path(__file__).name in where
    assert len(ours.take_guards(env, {ours.expression(size)})) == 1
    assert not [line for condition, line in ours.guards_of(env) if ours.expression(size) in condition.free_symbols]
    assert "x.shape[0] > 4" in where
    assert ours.holds(env, ours.expression(size) < 7)
    assert not ours.holds(env, ours.expression(size) < 6)
    assert not ours.guards_of(env)
    assert ours.simplified(env, ours.expression(size) + 1) == ours.expression(size) + 1
    ours.guard(env, ours.sympy.Eq(ours.expression(size), 6))
    assert ours.simplified(env, ours.expression(size)) == 6


# -- process groups ----------------------------------------------------------------------------------------


@contextmanager
def one_process() -> Generator[dist.ProcessGroup]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore(), timeout=timedelta(seconds=41))
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@canary("how groups are known by name", "torch_internals.process_group, registered_group and finished_work")
def test_process_groups_by_name() -> None:
    with one_process() as group:
        assert ours.process_group(group.group_name) is group
        with ours.registered_group("mine", group):
            assert ours.process_group("mine").size() == 1
        with pytest.raises(Exception, match="mine"):
            ours.process_group("mine")
    assert ours.finished_work([torch.ones(1)]).wait()


@canary("a group's store or the options of its backend", "torch_internals.store_of and timeout_of, for batch.agree")
def test_store_and_timeout() -> None:
    with one_process() as group:
        store = ours.store_of(group)
        store.set("key", "value")
        assert store.get("key") == b"value"
        assert store.check(["key"])
        assert ours.timeout_of(group) == timedelta(seconds=41)


@canary("DeviceMesh._flatten", "torch_internals.whole_mesh_group, for meshes of two dims")
def test_whole_mesh_group() -> None:
    with one_process():
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("outer", "inner"))
        assert ours.whole_mesh_group(mesh).size() == 1


# -- Dynamo ------------------------------------------------------------------------------------------------


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


def captured(model: Callable[..., Any], *args: Any, dynamic: tuple[int, ...] = ()) -> fx.GraphModule:
    """The graph of a call. `dynamic`: places of arguments whose dim 0 is symbolic."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    for place in dynamic:
        torch._dynamo.mark_dynamic(args[place], 0)
    torch.compile(model, backend=backend, fullgraph=True)(*args)
    return graphs[0]


def tensors_of(gm: fx.GraphModule) -> list[fx.Node]:
    nodes = gm.graph.find_nodes(op="placeholder")
    return [node for node in nodes if isinstance(node.meta["example_value"], Tensor)]


@canary("the sources of placeholders", "dynamo_internals.source_of, source_name and is_of_module, for argument names")
def test_sources_of_arguments_and_of_modules() -> None:
    x = torch.ones(2, 3)
    gm = captured(Model(), x, {"ids": x + 1}, x + 2)
    sources = [dynamo_internals.source_of(node) for node in tensors_of(gm)]
    assert None not in sources
    names = {dynamo_internals.source_name(s): dynamo_internals.is_of_module(s) for s in sources}
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


@canary("the frame that is compiled", "dynamo_internals.wrapped_names, for names of arguments behind a decorator")
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
        found.update({id(dynamo_internals.input_value(node)): node.name for node in tensors_of(gm)})
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
    known = dynamo_internals._OF_MODULES | dynamo_internals._OTHERS
    new = sorted(kind.__name__ for kind in kinds - known if kind.__module__ == dynamo.__name__)
    assert not new, (
        f"torch {torch.__version__} has new kinds of sources, {new}: say in passes/graph/dynamo_internals.py whether "
        "what they are read off is a module; is_of_module relies on it"
    )


def test_an_unknown_kind_of_source_is_an_error_that_names_it() -> None:
    class NewSource(dynamo.AttrSource):  # pyright: ignore[reportUntypedBaseClass]
        pass

    source = dynamo.GetItemSource(NewSource(dynamo.LocalSource("self"), "weight"), 0)
    with pytest.raises(TypeError, match=r"does not know the source NewSource of L\['self'\].weight\[0\]"):
        dynamo_internals.is_of_module(source)


@canary(
    "graph breaks: compile_subgraph_reason, names of resumed functions", "dynamo_internals.break_reason, is_resumed"
)
def test_graph_breaks() -> None:
    seen: list[tuple[str | None, bool]] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        seen.append((dynamo_internals.break_reason(gm), dynamo_internals.is_resumed()))
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
    assert not dynamo_internals.is_resumed()


@canary("exc.ShortenTraceback, which Dynamo does not wrap", "dynamo_internals.unwrapped, for errors of the backend")
def test_errors_of_a_backend() -> None:
    def backend(gm: fx.GraphModule, _: Any) -> Any:
        try:
            raise ValueError("no graph")
        except ValueError as error:
            raise dynamo_internals.unwrapped(error) from None

    torch._dynamo.reset()
    with pytest.raises(ValueError, match=r"^no graph$"):
        torch.compile(torch.neg, backend=backend)(torch.ones(3))
    other = KeyError("x")
    assert dynamo_internals.unwrapped(other) is other


@canary("side effects: SideEffects.store_attr_mutations, id_to_variable", "dynamo_internals.kept_values")
def test_values_that_outlive_a_call() -> None:
    seen: list[str] = []
    bag: list[Tensor] = []

    class Keeper(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
        def forward(self, x: Tensor) -> Tensor:
            self.load = x.sum()
            bag.append(x * 2)
            fresh = [x * 3]
            return x + fresh[0]

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        seen.extend(f"{node.name}: {where}" for node, where in dynamo_internals.kept_values().items())
        return gm.forward

    torch._dynamo.reset()
    torch.compile(Keeper(), backend=backend, fullgraph=True)(torch.ones(3))
    assert sorted(seen) == ["mul: L['bag']", "sum_1: L['self'].load"]
    assert not dynamo_internals.kept_values()


@canary("TracingContext or FakeTensorMode.from_tensor", "dynamo_internals.inner_mode and fake_input, for plan inputs")
def test_inputs_of_the_inner_compiler() -> None:
    sizes: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        mode = ours.fake_mode_of(gm.graph.nodes)
        assert mode is not None
        inner = dynamo_internals.inner_mode(mode)
        assert inner is not mode
        assert inner.shape_env is mode.shape_env
        assert all(value.fake_mode is inner for value in inputs if isinstance(value, ours.FakeTensor))
        fake = dynamo_internals.fake_input(inner, torch.ones(5, 3), "cp_table", [True, False])
        assert isinstance(fake, ours.FakeTensor)
        sizes.extend([*fake.shape, ours.hint(fake.shape[0])])
        return gm.forward

    torch._dynamo.reset()
    torch.compile(torch.sin, backend=backend)(torch.ones(4))
    assert isinstance(sizes[0], torch.SymInt)
    assert sizes[1:] == [3, 5]
    mode = ours.FakeTensorMode()
    assert dynamo_internals.inner_mode(mode) is mode


@canary("the frame that Dynamo translates, and a compile inside of a backend", "dynamo_internals.frame_call")
def test_a_function_is_traced_again_on_other_tensors() -> None:
    short, long, scale = torch.ones(2), torch.ones(5), 3
    seen: list[Any] = []
    held = SimpleNamespace(z=UserDict(z=short))

    def function(x: Tensor, *more: Tensor, y: Tensor, **others: Any) -> Tensor:
        sums = [c.sum() for part in (x, others["z"].z["z"]) for c in part.split(1)]
        return sum(sums) * len(more) * scale + y.sum()

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        count: Any = lambda gm: sum(n.target == "sum" for n in gm.graph.nodes)  # noqa: E731
        seen.extend([count(gm), traced_again({id(short): long}, count)])
        assert dynamo_internals.frame_call(lambda x: x) is not None
        return gm.forward

    torch._dynamo.reset()
    found = torch.compile(function, backend=backend)(short, short, y=short, z=held)
    assert found == function(short, short, y=short, z=held)
    assert seen == [5, 11]
    assert traced_again({}, lambda gm: gm) is None


# -- higher-order ops --------------------------------------------------------------------------------------


@canary("the operands of flex_attention", "dynamo_internals.FLEX_OPERANDS, for match.flex")
def test_flex_operands() -> None:
    op = torch.ops.higher_order.flex_attention
    assert tuple(inspect.signature(type(op).__call__).parameters)[1:] == dynamo_internals.FLEX_OPERANDS


@canary("BlockMask.as_tuple", "dynamo_internals.FlexBlocks, for match.flex")
def test_flex_blocks() -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, "cpu", BLOCK_SIZE=(64, 128))
    found: Any = dynamo_internals.FlexBlocks.read(mask.as_tuple())
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
