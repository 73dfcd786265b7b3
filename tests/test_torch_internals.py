"""Private parts of torch are still what the source takes them for. Each test says what broke and who depends on it."""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor, nn
from torch._dynamo.backends.distributed import DDPOptimizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.utils.checkpoint import checkpoint

from cp_rewrite import torch_internals as ours
from cp_rewrite.passes.graph.new_nodes import traced
from tests.helpers.canary import canary, captured, tensors_of
from tests.test_rooms import SOURCES

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
    "torch.ops._c10d_functional.all_gather_into_tensor.default": "ops.exchanges.all_gather",
    "torch.ops._c10d_functional.all_to_all_single.default": "ops.scatter_heads",
    "torch.ops._c10d_functional.reduce_scatter_tensor.default": "ops.exchanges.all_gather",
    "torch.ops.aten._flash_attention_backward.default": "kernels.flash.aten_flash",
    "torch.ops.aten._flash_attention_forward.default": "kernels.flash.aten_flash",
}
"""Used as they are: what is private in torch -> who uses it."""


def test_errors_of_a_capture() -> None:
    """A model that can't be read, or not for all sizes; segments.blocks then reads its blocks one by one."""

    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    def fails(gm: fx.GraphModule, _: Any) -> Any:
        raise AssertionError("of what Dynamo calls")

    def at_run(gm: fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            raise ValueError("of the graph that runs")

        return run

    for model, backend, expected in ((breaks, "eager", True), (torch.sin, fails, True), (torch.cos, at_run, False)):
        with pytest.raises(Exception, match=r".") as error:
            torch.compile(lambda x, model=model: model(x), backend=backend, fullgraph=True)(torch.ones(2))
        assert ours.raised_in_capture(error.value) == expected


@pytest.mark.skipif(not ours.READS_REGIONS_ONCE, reason="torch before 2.13")
def test_a_marked_region_is_read_once() -> None:
    """However often it is called: segments.blocks marks the blocks of a model so."""
    region: Any = torch.compiler.nested_compile_region(lambda layer, x: layer(x).sin(), max_reuse_entries=99)
    layers, found = nn.ModuleList(nn.Linear(3, 3) for _ in range(4)), list[Any]()

    def model(x: Tensor) -> Tensor:
        for layer in layers:
            x = region(layer, x)
        return x

    def backend(gm: fx.GraphModule, _: list[Any]) -> Any:
        found.extend(node.args[0].target for node in gm.graph.nodes if "invoke_subgraph" in str(node.target))  # type: ignore[union-attr]
        return gm.forward

    torch.compile(model, backend=backend, fullgraph=True)(torch.ones(2, 3))
    assert len(found) > len(set(found))


@pytest.mark.parametrize("path", USED)
def test_what_is_used_as_it_is_is_there(path: str) -> None:
    module, _, name = path.rpartition(".")
    try:
        assert hasattr(pkgutil.resolve_name(module), name) or importlib.import_module(path)
    except (ImportError, AttributeError):
        raise AssertionError(f"torch {torch.__version__} has no {path}; {USED[path]} relies on it") from None


def private_imports(file: Path) -> list[str]:
    """Imports of a file from torch that are private by name."""
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
        if file.name not in ("torch_internals.py", "dynamo.py")
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


@canary("FakeTensorMode.cache_enabled", "passes.run_passes, which is faster without the cache")
def test_disable_fake_tensor_cache() -> None:
    mode = ours.FakeTensorMode()
    mode.cache_enabled = True
    before = ours.FakeTensorMode.cache_info()
    with ours.disable_fake_tensor_cache(mode), mode:
        torch.ones(2)
    assert ours.FakeTensorMode.cache_info() == before
    with mode:
        torch.ones(2)
    assert ours.FakeTensorMode.cache_info() != before


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


@canary("FakeTensor(mode, meta tensor, device)", "torch_internals.fake_tensor, by which graphs get other sizes")
def test_fake_tensor() -> None:
    mode, meta = ours.FakeTensorMode(), torch.empty(6, device="meta")
    x, tail = (ours.fake_tensor(mode, given, torch.device("cpu")) for given in (meta, meta[2:]))
    with mode:
        assert (x.device.type, x.shape, x.dtype) == ("cpu", (6,), torch.float32)
        assert ours.memory_id(x) == ours.memory_id(tail) == ours.memory_id(tail.view(2, 2)[0])
        assert (x[2:] + tail).shape == (4,)
    assert ours.mode_of(x) is mode


class Watch(ours.TorchDispatchMode):  # pyright: ignore[reportUntypedBaseClass]
    """Notes which ops are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@canary("which op overloads the dispatcher falls apart into", "locality.run and canonicalize")
def test_ops_that_are_called_directly() -> None:
    """`ops/attention.py`, `ops/pushed.py`."""
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

    twice.register_fake(torch.empty_like)
    with torch.no_grad():
        assert not twice(x).requires_grad
        assert callers.pop() == "run"
        with Watch() as watch:  # modes and traces see the op all the same
            twice(x)
        assert torch.ops.cp_rewrite_test.twice.default in watch.seen
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
    with ours.FakeTensorMode(), ours.enable_python_dispatcher(), Watch() as watch:
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3))
    assert torch.ops.aten.mm.default in watch.seen
    assert all(isinstance(func, ours.OpOverload) for func in watch.seen)


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


def of_math(t: int) -> float:
    small = math.exp(-t / 9) + math.exp2(-t / 9) + math.expm1(-t / 9) + math.erf(t / 9) + math.erfc(t / 9)
    return small + math.log1p(t) / math.log10(t) + math.asinh(t) + math.acosh(t) + math.atanh(1 / t) + math.lgamma(t)


@pytest.mark.parametrize("of_size", [of_math, lambda t: math.log(t, 2), lambda t: math.pow(t, 0.5), lambda t: 0.9**t])
@canary("torch._sym_log, which Dynamo calls for math.log of a symbolic number", "torch_internals.MathFunctions")
def test_functions_of_math(monkeypatch: pytest.MonkeyPatch, of_size: Callable[[int], float]) -> None:
    def model(x: Tensor) -> Tensor:
        t = x.shape[0]
        return x * of_size(t) if math.log(t / 2) > 1 and math.exp(-t / 9) < 0.5 and math.log10(t) < 1 else x

    monkeypatch.setattr(ours.MathFunctions, "kept", True)
    (node,) = tensors_of(captured(model, torch.ones(6), dynamic=(0,)))
    assert ours.fixed_number(node.meta["example_value"].shape[0]) is None
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", dynamic=True)
    for size in (4, 6, 7, 9, 10, 99):
        assert torch.equal(compiled(torch.ones(size)), model(torch.ones(size)))


@canary("BuiltinVariable.call_range, fake_impls._compute_slice_index", "torch_internals: loops over ranges")
def test_ranges_over_a_symbolic_number_ask_for_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(x: Tensor) -> Tensor:
        ours.comptime(lambda _: ours.leave_ones_open())
        return torch.cat([x[i : i + 4] * 2 for i in range(0, x.shape[0], 4)])

    monkeypatch.setattr(ours.MathFunctions, "kept", True)
    for size in (6, 8, 9):
        (node,) = tensors_of(captured(model, torch.ones(size), dynamic=(0,)))
        assert ours.fixed_number(node.meta["example_value"].shape[0]) is None
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", dynamic=True)
    for size in (8, 6, 9, 12, 7, 5, 40):
        assert torch.equal(compiled(torch.ones(size)), model(torch.ones(size)))


def test_functions_of_math_are_torchs_own_elsewhere() -> None:
    with pytest.raises(ConstraintViolationError):
        captured(lambda x: x * math.log(x.shape[0], 2), torch.ones(6), dynamic=(0,))


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


# -- torch.compile -----------------------------------------------------------------------------------------


@canary("what Dynamo calls frames by", "torch_internals.is_compiled_around")
def test_compiled_around() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        seen.append(ours.is_compiled_around())
        return x + 1

    torch._dynamo.reset()
    torch.compile(look, backend="eager")(torch.ones(1))
    look(torch.ones(1))
    assert seen == [True, False]


_OWNERS: list[tuple[bool, bool]] = []


def _note_owner(_: Any) -> None:
    """Called by Dynamo, which allows no closure."""
    _OWNERS.append((ours.compiled_by("torch"), ours.compiled_by(__name__)))


@canary("where DDPOptimizer keeps the backend that it is put around", "torch_internals.compiled_by")
def test_a_backend_is_known_below_what_torch_puts_around_it() -> None:
    def own(gm: fx.GraphModule, _: list[Any]) -> Any:
        return gm.forward

    def look(x: Tensor) -> Tensor:
        ours.comptime(_note_owner)
        return x + 1

    _OWNERS.clear()
    for backend in (own, DDPOptimizer(1 << 20, own).compile_fn, "eager"):
        torch._dynamo.reset()
        torch.compile(look, backend=backend, fullgraph=True)(torch.ones(1))
    assert _OWNERS == [(False, True), (False, True), (True, False)]


@canary("comptime", "torch_internals.trace_transformers")
def test_hooks_are_installed_while_a_model_is_traced() -> None:
    module = pytest.importorskip("transformers.utils.output_capturing")
    ours.trace_transformers()
    known, traced = nn.Linear(2, 2), nn.Linear(2, 2)
    module.maybe_install_capturing_hooks(known)

    def model(x: Tensor) -> Tensor:
        module.maybe_install_capturing_hooks(traced)
        return traced(x)

    torch._dynamo.reset()
    torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 2))
    assert known._output_capturing_hooks_installed
    assert traced._output_capturing_hooks_installed


@canary("_disable_side_effect_safety_checks_for_current_subtracer", "torch_internals.trace_transformers")
def test_hooks_inside_of_checkpoints_fill_lists_outside_of_them() -> None:
    module = pytest.importorskip("transformers.utils.output_capturing")
    ours.trace_transformers()
    part = nn.Linear(2, 2)
    module.maybe_install_capturing_hooks(part)
    module.install_output_capuring_hook(part, "logits", 0)

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        found: dict[str, list[Tensor]] = {"logits": []}
        module.maybe_install_capturing_hooks(part)
        token = module._active_collector.set(found)
        y = checkpoint(lambda x: part(x).sin(), x, use_reentrant=False)
        module._active_collector.reset(token)
        return y, found["logits"][0]

    torch._dynamo.reset()
    x = torch.ones(1, 2)
    y, logits = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(logits, part(x))
    assert torch.equal(y, part(x).sin())


def _note_traced(context: Any) -> None:
    ours.traced_object(context, "module").weight.requires_grad_(False)


@canary("comptime", "ops.states.functions")
def test_an_object_is_found_while_it_is_traced() -> None:
    traced = nn.Linear(2, 2)

    def model(module: nn.Module, x: Tensor) -> Tensor:
        ours.comptime(_note_traced)
        return module(x)

    torch._dynamo.reset()
    torch.compile(model, backend="eager", fullgraph=True)(traced, torch.ones(1, 2))
    assert not traced.weight.requires_grad


_held: list[Any] = []


def _note_values(context: Any) -> None:
    _held.extend((ours.traced_values(context, name, ["left"])) for name in ("given", "made"))


@canary("comptime", "batch.encoders")
def test_values_are_found_while_they_are_traced() -> None:
    """A dict of inputs and constants is found; not one with a tensor that the traced code made."""

    def model(x: Tensor, y: Tensor) -> Tensor:
        given = {"left": y + 1, "x": x, "words": ("a", 2), "none": None}
        made = {"x": x, "y": y + 1}
        ours.comptime(_note_values)
        return given["x"] + made["y"]

    torch._dynamo.reset()
    _held.clear()
    x = torch.ones(1, 2)
    torch.compile(model, backend="eager", fullgraph=True)(x, torch.ones(1, 2))
    assert _held == [{"x": x, "words": ("a", 2), "none": None}, None]
    assert _held[0]["x"] is x


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


@canary("ProcessGroupGloo on a group's store", "torch_internals.host_group and all_bytes, for batch.given.own_rows")
def test_bytes_from_host_to_host() -> None:
    with one_process() as group:
        hosts = ours.host_group(group, "rows/1")
        assert ours.all_bytes(hosts, b"abc") == [b"abc"]


@canary("DeviceMesh._get_root_mesh", "torch_internals.root_mesh, for slices that parallelize refuses")
def test_root_mesh() -> None:
    with one_process():
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("outer", "inner"))
        assert ours.root_mesh(mesh["inner"]) is mesh
        assert ours.root_mesh(mesh) is mesh


@canary("torch._dynamo.callback", "torch_internals.on_compiles, for calls.observe")
def test_callbacks_of_compiles() -> None:
    seen = list[str]()
    starts, ends = seen.append, lambda name: seen.append(f"{name} ended")
    for _ in range(2):  # asked for twice, called once
        ours.on_compiles(starts, ends)
    try:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    finally:
        torch._dynamo.reset()
    assert seen == ["DYNAMO", "DYNAMO ended"]


@canary("ShapeEnv.evaluate_sym_node, OutputGraph.add_cleanup_hook", "torch_internals.leave_ones_open, for batch.as_row")
def test_sizes_of_one() -> None:
    """An op's question whether a size is 1 does not fix it; a branch of Python's does."""
    sizes = list[Any]()

    def backend(gm: Any, given: Any) -> Any:
        chunk = next(n for n in gm.graph.nodes if n.op == "output").args[0][0].meta["example_value"]
        sizes.append(chunk.shape[0])
        return gm

    def last(x: Tensor, asks: bool) -> Tensor:
        ours.comptime(lambda _: ours.leave_ones_open())
        chunk = x.split(16)[-1]
        out = (chunk @ torch.ones(2, 2)).reshape(-1, 2)
        return out * 2 if asks and chunk.shape[0] == 1 else out

    for asks in (False, True):
        row = torch.ones(17, 2)
        torch._dynamo.maybe_mark_dynamic(row, 0)
        assert torch.compile(last, backend=backend, fullgraph=True)(row, asks).shape == (1, 2)
        assert ours.has_one(sizes[-1]) is not asks


@canary("the engine's callbacks", "torch_internals.at_end_of_backward, for batch.steps.backward")
def test_end_of_a_backward() -> None:
    weight, seen = nn.Parameter(torch.ones(1)), list[Any]()
    loss = (weight * 2).sum()
    assert loss.grad_fn is not None
    loss.grad_fn.register_prehook(lambda _: ours.at_end_of_backward(lambda: seen.append(weight.grad)))
    loss.backward()
    assert seen == [weight.grad]


@canary("DeviceMesh._flatten", "torch_internals.whole_mesh_group, for meshes of two dims")
def test_whole_mesh_group() -> None:
    with one_process():
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("outer", "inner"))
        assert ours.whole_mesh_group(mesh).size() == 1


@canary("DeviceMesh._unflatten, ShardPlacementResult", "torch_internals.cut_in_groups, for experts that ranks share")
def test_weights_that_some_ranks_shard() -> None:
    """Over a mesh of one rank torch 2.13 divides gradients by the factor twice: `SharedExperts` lets FSDP leave such
    weights alone. Where this fails, torch has changed that."""
    with one_process():
        rest, group = ours.cut_in_groups(init_device_mesh("cpu", (1,), mesh_dim_names=("all",)), 1)
        assert (rest.size(), group.size()) == (1, 1)
        assert ours.shards_over_some()
        model: Any = nn.Linear(2, 2, bias=False)
        fully_shard(model, mesh=rest, shard_placement_fn=lambda _: ours.sharded_over(rest)(0))
        model.set_gradient_divide_factor(2)
        model.set_force_sum_reduction_for_comms(True)
        model(torch.ones(1, 2)).sum().backward()
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((2, 2), 0.25))


@canary("dist.new_group(use_local_synchronization=True)", "torch_internals.grid_groups, for nodes of a flat mesh")
def test_grid_groups() -> None:
    with one_process():
        group = init_device_mesh("cpu", (1,)).get_group()
        outer, inner = ours.grid_groups(group, 1)
        assert (outer.size(), inner.size()) == (1, 1)
        assert ours.grid_groups(group, 1) == (outer, inner)
