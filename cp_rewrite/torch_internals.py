"""Private parts of torch that the source uses, each behind a function that says what is asked of it.

Read in torch 2.11 to 2.15, which agree in all of it unless a function says otherwise. What belongs to Dynamo and to
flex_attention is in `passes/graph/dynamo.py`. `tests/test_torch_internals.py` has a test for each function, which fails
by name when torch changes.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import sys
import traceback
import weakref
from collections.abc import Callable, Generator, Iterable
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import sympy
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as distributed_c10d
import torch.fx as fx
from sympy.core.relational import Relational
from torch import SymBool, SymFloat, SymInt, Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future, _register_process_group, _unregister_process_group
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._decomp.decompositions import matmul
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import convert_frame
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.comptime import comptime
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import _disable_side_effect_safety_checks_for_current_subtracer as _allow_side_effects
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, SymNodeVariable
from torch._guards import TracingContext
from torch._library.autograd import make_autograd_impl
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, disable_fake_tensor_cache
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_process_group_store, _resolve_process_group
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.library import CustomOpDef
from torch.nn.attention.flex_attention import _LARGE_SPARSE_BLOCK_SIZE
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod
from torch.utils._sympy.printers import CppPrinter, PythonPrinter
from torch.utils._sympy.value_ranges import SymPyValueRangeAnalysis, ValueRanges

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "Max",
    "Min",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "comptime",
    "disable_fake_tensor_cache",
    "enable_python_dispatcher",
    "matmul",
]
"""Handed on as they are. Composite ops fall apart under `enable_python_dispatcher` as Dynamo saw them do; without it
their C++ code turns symbolic sizes into constants. Dynamo runs what `comptime` is called with while it traces the
call. `matmul` is the product written in Python, in bmm and views."""
LARGE_BLOCK = _LARGE_SPARSE_BLOCK_SIZE
"""A BlockMask of blocks of this size fits attention of any length."""
READS_REGIONS_ONCE = "max_reuse_entries" in inspect.signature(torch.compiler.nested_compile_region).parameters
"""True from 2.13 on: Dynamo reads a function once that is marked as a compile region, however often it is called."""


def raised_in_capture(error: BaseException) -> bool:
    """True if an error came while Dynamo compiled: one of its own, as where it can't capture a model, or not for all
    sizes that it was asked for; or of what it called, as a failed assertion."""
    frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    own = isinstance(error, TorchDynamoException | ConstraintViolationError)
    return own or convert_frame._compile.__code__ in frames


# -- fake tensors and memory -------------------------------------------------------------------------------


def fake_mode_of(nodes: Iterable[fx.Node]) -> FakeTensorMode | None:
    """The mode of the fake tensors that a graph's nodes carry: all carry the same. None where there are none.

    While a backend runs, Dynamo's tracing context holds another mode: only their own fits the tensors.
    """
    values = (node.meta.get("example_value") for node in nodes)
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


def mode_of(value: Tensor) -> FakeTensorMode | None:
    """The mode that made a fake tensor; None of a real one."""
    return value.fake_mode if isinstance(value, FakeTensor) else None


def fake_tensor(mode: FakeTensorMode, meta: Tensor, device: torch.device) -> Tensor:
    """A fake tensor of a mode on a device, with the sizes of one on "meta", whose memory it shares. Without an op that
    runs under the mode it takes a twentieth of the time."""
    return FakeTensor(mode, meta, device)


def is_traced() -> bool:
    """True while Dynamo traces a function in this thread, of what torch itself does with its inputs. The traced code
    is told by `torch.compiler.is_compiling`, which is not true of that in torch 2.11."""
    return TracingContext.try_get() is not None


def compiled_by(module: str) -> bool:
    """True if what Dynamo traces now goes to a backend that is defined in a module, or below it."""
    try:
        backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        return False
    while True:
        holder = getattr(getattr(backend, "__self__", backend), "__dict__", {})  # a method's object: DDPOptimizer
        name = next((name for name in _WRAPPED if name in holder), None)
        if name is None:
            break
        backend = holder[name]
    home: str = getattr(backend, "__module__", None) or type(backend).__module__
    return home == module or home.startswith(f"{module}.")


_WRAPPED = ("compiler_fn", "_torchdynamo_orig_backend", "inner_fn", "func", "backend_compile_fn")
"""Where wrappers of torch around a backend keep it."""


def is_of_fsdp(frame: Any) -> bool:
    """True of a frame of FSDP2's code."""
    return frame.f_code.co_filename.startswith(f"{torch.__path__[0]}/distributed/fsdp/")


_COMPILER = tuple(f"{torch.__path__[0]}/{room}" for room in ("_dynamo", "_subclasses", "fx"))


def is_of_compiler(frame: Any) -> bool:
    """True of the frame of torch's compiler, or of a guard that it makes out of text, which torch 2.11 runs as any
    other code."""
    code = frame.f_code
    if code.co_filename == "<string>":
        return code.co_name == "guard" or (frame.f_back is not None and is_of_compiler(frame.f_back))
    return code.co_filename.startswith(_COMPILER)


def known_number(tensor: Tensor) -> Any:
    """The number in a tensor of one element, where it is real or a fake one that remembers it."""
    real = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if real is None or real.numel() != 1 or isinstance(real, FakeTensor):
        return None
    with _disable_current_modes():
        return real.item()


def is_parameter(value: Any) -> bool:
    """True if a tensor, a fake one perhaps, is a weight."""
    return isinstance(value, nn.Parameter) or bool(getattr(value, "_is_param", False))


def memory_id(tensor: Tensor) -> int:
    """Equal for tensors that share their storage."""
    return tensor.untyped_storage()._cdata


def raw_stream(index: int) -> int:
    """The current stream of a GPU, its handle alone: an object around it takes as long as a launch."""
    return torch._C._cuda_getCurrentRawStream(index)


_direct: list[torch.library.Library] = []


def call_directly(op: CustomOpDef, device_type: str = "cuda") -> None:
    """On GPUs the dispatcher calls the function of a custom op itself, once where no gradient is asked for. Torch's
    layers around it, which check that results are no inputs, and the second way through the dispatcher, below autograd,
    take longer than a launch; they stay on the CPU, where tests run. To be called after `register_autograd`."""
    torch.library.impl(op._qualname, device_type, op._init_fn)
    kernel, with_gradients = getattr(torch._C.DispatchKey, device_type.upper()), make_autograd_impl(op._opoverload, op)
    alone: dict[int, bool] = {}  # by the keys of a call: whether nothing else follows autograd, as modes and traces do

    def run(keys: Any, *args: Any) -> Any:
        known = alone.get(raw := keys.raw_repr())
        if known is None:
            below = (keys & torch._C._after_ADInplaceOrView_keyset).remove(torch._C.DispatchKey.BackendSelect)
            known = alone[raw] = below.highestPriorityTypeId() == kernel
        if not known or (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
            return with_gradients(keys, *args)
        with torch._C._AutoDispatchBelowAutograd():
            return op._init_fn(*args)

    library = torch.library.Library(op._namespace, "FRAGMENT")
    library.impl(op._name, run, f"Autograd{device_type.upper()}", with_keyset=True)
    _direct.append(library)


# -- functorch ---------------------------------------------------------------------------------------------

_functorch: Any = torch._C._functorch


def is_wrapped(tensor: Tensor) -> bool:
    """True if a tensor stands inside a `torch.func` transform (vmap, grad, jvp)."""
    return _functorch.is_functorch_wrapped_tensor(tensor)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor outside of all transforms."""
    while is_wrapped(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def transform_depth() -> int:
    """How many transforms run."""
    return _functorch.maybe_current_level() or 0


def leave_vmaps(depth: int) -> None:
    """Leave the vmaps that were entered beyond a depth and not left, as by a graph that failed in the middle."""
    while transform_depth() > depth:
        _functorch._vmap_decrement_nesting()


def is_transform(target: Any) -> bool:
    """True if a node's target enters, leaves or is part of a transform, or takes gradients."""
    module = str(getattr(target, "__module__", ""))
    return module.startswith(("torch._functorch", "torch._C._functorch")) or target is torch.autograd.grad


# -- autograd ----------------------------------------------------------------------------------------------


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Inside of a backward: call a function when it has stored all gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


# -- symbolic sizes ----------------------------------------------------------------------------------------


def expression(size: Any) -> sympy.Expr:
    """A number or symbolic number, as the shape environment knows it now: guards make several symbols one."""
    return size.node.expr if isinstance(size, SymInt | SymFloat | SymBool) else sympy.sympify(size)


def symbolic(shape_env: Any, expr: Any, kind: type) -> Any:
    """A number of a graph, a `kind` of SymInt, SymFloat or SymBool, that is worth an expression in symbols it has."""
    if expr.is_number or expr in (sympy.true, sympy.false):
        return {SymInt: int, SymFloat: float, SymBool: bool}[kind](expr)
    if kind is SymInt:
        return shape_env.create_symintnode(expr, hint=None)
    return shape_env.create_symfloatnode(expr, hint=None) if kind is SymFloat else shape_env.create_symboolnode(expr)


class MathFunctions:
    """A switch. kept: Dynamo keeps functions of `math` of a symbolic number in a graph, as it does math.sqrt; else it
    makes a constant of the number, as torch does."""

    kept = False


def _keep_function(name: str) -> None:
    """Let Dynamo find torch's function of this name where the one of `math` is given a symbolic number."""
    function = getattr(math, name)
    opaque = getattr(sympy_functions, f"OpaqueUnaryFn_{name}", None) or sympy_functions.make_opaque_unary_fn(name)

    def kept(a: Any, *more: Any) -> Any:
        numbers = isinstance(a, SymInt | SymFloat) and all(isinstance(b, int | float) for b in more)
        if not MathFunctions.kept or not numbers:
            return function(a, *more)
        number = torch.sym_float(a).node
        found = symbolic(number.shape_env, opaque(number.expr), SymFloat)
        return found / math.log(*more) if more else found  # a base

    def in_python(self: Any, expr: Any) -> str:
        return f"math.{name}({self._print(expr.args[0])})"

    def in_cpp(self: Any, expr: Any) -> str:
        return f"std::{name}({self._print(expr.args[0])})"

    _add_function(name, kept)
    for printer, write in ((PythonPrinter, in_python), (CppPrinter, in_cpp)):  # of guards
        if not hasattr(printer, f"_print_OpaqueUnaryFn_{name}"):
            setattr(printer, f"_print_OpaqueUnaryFn_{name}", write)
    if not hasattr(SymPyValueRangeAnalysis, name):
        setattr(SymPyValueRangeAnalysis, name, staticmethod(lambda _: ValueRanges.unknown()))


def _add_function(name: str, function: Callable[..., Any]) -> None:
    function.__module__, function.__name__, function.__qualname__ = "torch", f"_sym_{name}", f"_sym_{name}"
    setattr(torch, f"_sym_{name}", function)


def _power(a: Any, b: Any) -> Any:
    """math.pow, of floats alone."""
    return torch.sym_float(a) ** torch.sym_float(b) if MathFunctions.kept else math.pow(a, b)


for _name in "exp log log1p log10 expm1 exp2 erf erfc asinh acosh atanh lgamma".split():
    if not hasattr(torch, f"_sym_{_name}"):
        _keep_function(_name)
if not hasattr(torch, "_sym_pow"):
    _add_function("pow", _power)


def _range_by_count(call_range: Callable[..., Any]) -> Callable[..., Any]:
    """Let `range(0, T, 8)` ask how many steps it has, where torch makes a constant of a symbolic T."""

    @functools.wraps(call_range)
    def counted(self: Any, tx: Any, *args: Any) -> Any:
        if MathFunctions.kept and len(args) == 3 and isinstance(args[1], SymNodeVariable):
            start, step = (args[i].as_python_constant() if args[i].is_python_constant() else None for i in (0, 2))
            if isinstance(start, int) and isinstance(step, int) and step > 1:
                count = int((args[1].sym_num - start + step - 1) // step)  # a guard
                end = start + max(count, 0) * step
                vars(args[1].sym_num.node.shape_env).setdefault("_cp_rewrite_ranges", set()).add(
                    range(start, end, step)
                )
                args = (args[0], ConstantVariable.create(end), args[2])
        return call_range(self, tx, *args)

    return counted


def ranges_of(shape_env: Any) -> frozenset[range]:
    """Ranges whose steps Dynamo counted so while it traced under a shape environment."""
    return frozenset(vars(shape_env).get("_cp_rewrite_ranges", ()))


BuiltinVariable.call_range = _range_by_count(BuiltinVariable.call_range)  # type: ignore[method-assign]


def hint(size: Any) -> Any:
    """Value of a symbolic number in the example that is traced; None where it has none. A number is itself."""
    if not isinstance(size, SymInt | SymFloat):
        return size
    return size.node.hint if size.node.has_hint() else None


def has_one(size: Any) -> bool:
    """True of a size that is 1 in the example alone: `squeeze` of a trace that leaves it open keeps the dim."""
    return isinstance(size, SymInt) and hint(size) == 1


def guards_of(shape_env: Any) -> list[tuple[sympy.Basic, str]]:
    """(condition, the line that it is from) of all that was decided by sizes, in the symbols of that moment."""
    return [(guard.expr, guard.sloc.maybe_user_loc or str(guard.sloc)) for guard in shape_env.guards]


def take_guards(shape_env: Any, symbols: AbstractSet[Any]) -> list[sympy.Basic]:
    """Conditions on these symbols, taken out of the guards: Dynamo fails over symbols of what is no argument."""
    taken = [guard for guard in shape_env.guards if guard.expr.free_symbols & symbols]
    shape_env.guards = [guard for guard in shape_env.guards if not guard.expr.free_symbols & symbols]
    return [guard.expr for guard in taken]


def simplified(shape_env: Any, expr: Any) -> Any:
    """An expression in the symbols that are left: guards make several one, and numbers of some."""
    return expr if shape_env is None else shape_env.replace(expr)


def fixed_number(size: SymInt | SymFloat) -> float | None:
    """The number that guards have made of a symbolic one; None where they left it free."""
    fixed = simplified(size.node.shape_env, size.node.expr)
    return float(fixed) if fixed.is_number else None


def holds(shape_env: Any, condition: sympy.Basic) -> bool:
    """True if a condition on sizes is true in the example that is traced; no guard is added."""
    return in_example(shape_env, condition) == True  # noqa: E712


def in_example(shape_env: Any, expr: Any) -> Any:
    """Value of an expression of sizes in the example that is traced."""
    named = "backed_var_to_val" if hasattr(shape_env, "backed_var_to_val") else "var_to_val"  # up to torch 2.12
    return expr.xreplace(getattr(shape_env, named))


def guard(shape_env: Any, condition: sympy.Basic) -> None:
    """Have a batch for which a condition on sizes is not what it is in the example compiled anew."""
    shape_env.evaluate_expr(condition)


# -- torch.compile -----------------------------------------------------------------------------------------


def is_compiled_around() -> bool:
    """True if a function that was given to torch.compile is running: frames that Dynamo left to Python are inside."""
    return callable(get_eval_frame_callback())


_CAPTURING = "transformers.utils.output_capturing"


def traced_object(context: Any, name: str) -> Any:
    """The module that the traced code's local `name` is, inside of what `comptime` runs; None where it is no object."""
    return getattr(context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker().realize(), "value", None)


def traced_values(context: Any, name: str, leave_out: Iterable[str]) -> dict[str, Any] | None:
    """Entries of a dict by words, the traced code's local `name`, but for the words `leave_out`, inside of what
    `comptime` runs: constants, and tensors that Dynamo makes inputs of; None where there is anything else."""
    items: Any = context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker().realize().items
    held = {key.vt.as_python_constant(): value.realize() for key, value in items.items()}
    found: dict[str, Any] = {}
    for word in [word for word in held if word not in {*leave_out}]:
        value = held[word]
        if value.is_python_constant():
            found[word] = value.as_python_constant()
        elif (source := value.as_proxy().node.meta.get("grapharg") if value.is_proxy() else None) is not None:
            found[word] = source.example
        else:
            return None
    return found


def trace_transformers() -> None:
    """Let a model of `transformers` that is traced before it was called install the hooks that capture its outputs (as
    those of experts' routers): it does so with a lock, which Dynamo does not know."""
    module: Any = sys.modules.get(_CAPTURING)
    plain: Any = getattr(module, "maybe_install_capturing_hooks", None)
    if plain is None or hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def maybe_install_capturing_hooks(model: Any) -> None:
        comptime(_install_hooks, lambda: plain(model))

    module.maybe_install_capturing_hooks = maybe_install_capturing_hooks


def _install_hooks(context: Any) -> None:
    """While `maybe_install_capturing_hooks` is traced: do to its model what it does.

    Hooks are wrapped, to be traced in checkpoints. They append to lists that live outside of the checkpoint, which
    Dynamo refuses of any function, as the backward would do it once more. These find no list then.
    """
    module: Any = sys.modules[_CAPTURING]
    model = traced_object(context, "model")
    module.maybe_install_capturing_hooks.__wrapped__(model)
    for part in model.modules():
        for key, hook in part._forward_hooks.items():
            if getattr(hook, "__module__", None) == _CAPTURING and not hasattr(hook, "__wrapped__"):
                part._forward_hooks[key] = _traced_in_checkpoints(hook)


def _traced_in_checkpoints(hook: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(hook)
    def captures(*args: Any) -> None:
        _allow_side_effects(hook, *args)

    return captures


# -- process groups ----------------------------------------------------------------------------------------


def process_group(name: str) -> dist.ProcessGroup:
    """The group that graphs know by its name."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


@contextmanager
def registered_group(name: str, group: dist.ProcessGroup) -> Generator[None]:
    """Let graphs know a group by a name, one that torch did not make perhaps."""
    _register_process_group(name, group)
    try:
        yield
    finally:
        _unregister_process_group(name)


def finished_work(result: Any) -> Any:
    """The handle that a collective of a group returns when it has its result already."""
    future: Any = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


def store_of(group: dist.ProcessGroup) -> Any:
    """The group's own key-value store."""
    return _get_process_group_store(group)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of the group may take."""
    options: Any = getattr(group._get_backend(group._device_types[0]), "options", None)  # not every backend has some
    return timedelta(minutes=10) if options is None else options._timeout


def host_group(group: dist.ProcessGroup, name: str) -> dist.ProcessGroupGloo:
    """A group of the same ranks from host to host, which all of them make together under a new `name`; for one thread.

    `dist.new_group` would have to be called by all processes, members or not, or that have made as many groups."""
    store = dist.PrefixStore(name, store_of(group))
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout=timeout_of(group))


def all_bytes(group: dist.ProcessGroupGloo, mine: bytes) -> list[bytes]:
    """Bytes that each rank of a `host_group` gives, by rank, of any length but 0.

    `dist.all_gather_object` is for groups that torch registered: with `TORCH_DISTRIBUTED_DEBUG=DETAIL` it looks them
    up."""
    size = torch.tensor([len(mine)])
    sizes = [torch.empty_like(size) for _ in range(group.size())]
    group.allgather([sizes], [size]).wait()
    longest = max(map(int, sizes))
    padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
    found = [torch.empty_like(padded) for _ in sizes]
    group.allgather([found], [padded]).wait()
    return [x.numpy()[: int(n)].tobytes() for x, n in zip(found, sizes, strict=True)]


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that a mesh is a slice of, or itself."""
    return mesh._get_root_mesh()


def whole_mesh_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of a mesh of several dims."""
    return mesh._flatten().get_group()


def cut_in_groups(mesh: DeviceMesh, size: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Two meshes out of one of a single dim, in groups of `size` consecutive ranks: the ranks in this rank's place of
    all groups, and its group."""
    grid = mesh._unflatten(0, (mesh.size() // size, size), ("efsdp", "ep"))
    return grid["efsdp"], grid["ep"]


def copied_over_first(mesh: DeviceMesh, copies: int) -> DeviceMesh:
    """A mesh of two dims out of one: FSDP copies weights over the first, and shards them over the second."""
    return mesh._unflatten(0, (copies, mesh.size() // copies), ("replicate", "shard"))


def shards_over_some() -> bool:
    """True where FSDP shards some weights over other ranks than the rest: since torch 2.13."""
    return hasattr(_fsdp_common, "ShardPlacementResult")


def sharded_over(mesh: DeviceMesh) -> Callable[[int], Any]:
    """A function of a dim: it makes the result of `shard_placement_fn` for weights that FSDP shards over `mesh` in that
    dim. Those of one model must all come from one call."""
    here = _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return lambda dim: _fsdp_common.ShardPlacementResult(Shard(dim), here)


_grids: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Any]] = weakref.WeakKeyDictionary()
"""Group -> its `grid_groups`, by inner ranks."""


def grid_groups(group: dist.ProcessGroup, inner: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """(outer, inner) groups of this rank, where a group's ranks stand in lines of `inner`: a column, and a line. Made
    once, by the ranks of the group together; processes outside of it take no part."""
    made = _grids.setdefault(group, {})
    if inner not in made:
        ranks, me = dist.get_process_group_ranks(group), group.rank()
        line, column = ranks[me // inner * inner :][:inner], ranks[me % inner :: inner]
        members = _new_group(line, f"{group.group_name} in {inner} {line[0]}")
        made[inner] = _new_group(column, f"{group.group_name} between {inner} {column[0]}"), members
    return made[inner]


def _new_group(ranks: list[int], name: str) -> dist.ProcessGroup:
    """A group that its members make alone. Torch would name it by the number of groups that a process has: where
    members have made other numbers of them, each waits under a name of its own."""
    module: Any = distributed_c10d
    plain, hashed = module._process_group_name, hashlib.sha1(name.encode()).hexdigest()  # as torch names them
    module._process_group_name = lambda *_, **__: hashed
    try:
        return dist.new_group(ranks, use_local_synchronization=True)
    finally:
        module._process_group_name = plain


def on_compiles(starts: Callable[[str], None], ends: Callable[[str], None]) -> None:
    """Call `starts` and `ends` around every capture ("DYNAMO") and every backward that is compiled when it first runs
    ("LAZY_BACKWARD"), with that name; once, however often it is asked for."""
    if any(getattr(callback, "_cp_rewrite", None) is starts for callback in callback_handler.start_callbacks):
        return

    def started(args: CallbackArgs) -> None:
        starts(args.callback_trigger.name)

    started._cp_rewrite = starts  # type: ignore[attr-defined]
    callback_handler.register_start_callback(started)
    callback_handler.register_end_callback(lambda args: ends(args.callback_trigger.name))


def leave_ones_open() -> None:
    """Until Dynamo has the graph that it traces now, ops take a size that is 1 in the example for as open as any other,
    where torch would fix it: as of the last chunk of 17 tokens by 16. A slice up to the example's number of tokens,
    `h[:, 16:24]` of 24, ends with the row, where torch would ask for 24 tokens or more. What the traced function itself
    decides by a size falls as it does for the example."""
    try:
        output: Any = InstructionTranslator.current_tx().output
    except AttributeError:
        return
    stack = ExitStack()
    stack.enter_context(ones_open(output.shape_env))
    ends = vars(output.shape_env).setdefault("_cp_rewrite_ends", SliceEnds())
    stack.callback(ends.close)
    output.add_cleanup_hook(stack.close)


class SliceEnds:
    """Slices up to a number that is the example's size, which end where the tensor does. taken: (size, number) of those
    that a traced function takes; open: more may be."""

    def __init__(self) -> None:
        self.taken: set[tuple[Any, int]] = set()
        self.open = True

    def close(self) -> None:
        self.open = False


def _slice_ends(size: Any, index: Any) -> Any:
    ends = vars(size.node.shape_env).get("_cp_rewrite_ends") if isinstance(size, SymInt) else None
    if ends is None or type(index) is not int:
        return _slice_index(size, index)
    if ends.open and hint(size) == index and size <= index:  # a guard
        ends.taken.add((expression(size), index))
    known = any(
        number == index and simplified(size.node.shape_env, of) == expression(size) for of, number in ends.taken
    )
    return size if known else _slice_index(size, index)


_slice_index: Any = getattr(fake_impls, "_compute_slice_index", None)
if _slice_index is not None:
    fake_impls._compute_slice_index = _slice_ends


@contextmanager
def ones_open(env: Any) -> Generator[None]:
    """Let ops take sizes of a shape environment as `leave_ones_open` says."""
    if "evaluate_sym_node" in vars(env):
        yield
        return
    evaluate = env.evaluate_sym_node

    def open_evaluate(node: Any, *args: Any, **kwargs: Any) -> Any:
        if (decided := _of_one(env, node.expr)) is not None and _asks_an_op(sys._getframe(1)):
            return decided
        return evaluate(node, *args, **kwargs)

    env.evaluate_sym_node = open_evaluate
    try:
        yield
    finally:
        vars(env).pop("evaluate_sym_node", None)


def _of_one(env: Any, relation: Any) -> Any:
    """Outcome for larger n of a comparison that tells 1 from more, of a size n that is 1 in the example; else None.

    n == 1, n < 2               of a size
    24 * n == 24                of strides
    1 % n == 0                  of a dim that is 1, when dims are joined
    """
    if not isinstance(relation, Relational) or not relation.free_symbols:
        return None
    size, number = (relation.lhs, relation.rhs) if relation.rhs.is_Integer else (relation.rhs, relation.lhs)
    if number == 0 and isinstance(size, Mod | PythonMod) and isinstance(relation, sympy.Ne | sympy.Eq):
        joined, length = size.args
        few = isinstance(joined, sympy.Integer) and in_example(env, length) == joined and _divides(joined, length)
        return isinstance(relation, sympy.Ne) if few else None
    if not isinstance(number, sympy.Integer) or number < 1:
        return None
    times = sympy.S.One if number == 2 and in_example(env, size) == 1 else number
    if in_example(env, size) != times or not _divides(times, size):
        return None
    of_one, of_more = (
        relation.func(*(n if x == size else x for x in relation.args)) for n in (times, sympy.Integer(3) * times)
    )
    return of_more if of_one != of_more else None


def _divides(number: Any, size: Any) -> bool:
    """True if a size is a multiple of a number, whatever its symbols are. The quotient of two sizes, as of two
    arguments' tokens, counts as no whole number: it is 1 where these are equal."""
    quotient = any(part.args[1].free_symbols for part in size.atoms(FloorDiv))
    return not quotient and all(factor % number == 0 for factor in sympy.expand(size).as_coefficients_dict().values())


_SYMBOLS = tuple(
    f"{torch.__path__[0]}/{file}"
    for file in ("fx/experimental/sym_node.py", "fx/experimental/symbolic_shapes.py", "__init__.py")
)
_TRACED = tuple(f"{torch.__path__[0]}/_dynamo/{file}" for file in ("variables/", "symbolic_convert.py"))


def _asks_an_op(frame: Any) -> bool:
    """True if the relation of sizes that a frame evaluates is asked for by an op of torch: not by the function that
    Dynamo traces, nor by a check that it holds."""
    while frame is not None and frame.f_code.co_filename.startswith(_SYMBOLS):
        if frame.f_code.co_name == "expect_true":
            return False
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    return file.startswith(f"{torch.__path__[0]}/") and not file.startswith(_TRACED)
