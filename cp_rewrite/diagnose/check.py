"""Compare a model on one process with itself rewritten, on ranks played by threads.

    one process         model(the whole batch)                outputs, gradients
    thread of rank 0    rewritten(rank 0's tokens) ┐
    thread of rank 1    rewritten(rank 1's tokens) ┴ joined   outputs, gradients

`thread_group` makes the ranks, with an annotation (`ThreadSharding`) and collectives (`ThreadGroup`) of their own;
`check` runs the model both ways (`_Runner`), joins what ranks give and compares it.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor, nn
from torch.fx import traceback
from torch.fx.traceback import preserve_node_meta

from cp_rewrite import passes
from cp_rewrite.arguments import named_values
from cp_rewrite.batch.active import active_plan
from cp_rewrite.batch.gradients import group_of_threads
from cp_rewrite.batch.marks import TokenAxes, token_axes_of, token_dim_of
from cp_rewrite.batch.tokens import by_axes, cut_tokens, has_rows, join_tokens
from cp_rewrite.calls.check_calls import CallChecks
from cp_rewrite.calls.compare_masks import check_masks
from cp_rewrite.calls.left_out import LeftOutputs
from cp_rewrite.packing import untaken_args
from cp_rewrite.passes.capture.capture import capture, for_eager
from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.refusal import RewriteRefused
from cp_rewrite.sharding import Sharding, require_sharding
from cp_rewrite.torch_internals import finished_work, registered_group

GROUP = "cp_rewrite_threads"
"""The name by which graphs know the group."""
_place = threading.local()
_REDUCE = {dist.ReduceOp.SUM: torch.sum, dist.ReduceOp.MAX: torch.amax, dist.ReduceOp.MIN: torch.amin}


def rank() -> int:
    """The rank that this thread plays."""
    return getattr(_place, "rank", 0)


@dataclass(frozen=True)
class ThreadSharding(Sharding):
    """A Sharding whose rank is the one that the thread plays."""

    @property
    def rank(self) -> int:
        return rank()

    @property
    def group_name(self) -> str:
        return GROUP

    @staticmethod
    def like(sharding: Sharding) -> ThreadSharding:
        """The same annotation over threads. Of the exchanges they have only what `needed` calls, without a capacity."""
        values: dict[str, Any] = {f.name: getattr(sharding, f.name) for f in fields(Sharding)}
        values.update(
            mesh=sharding.world_size,
            exchange="needed",
            kernel="reference",
            inner="eager",
            verify="first_step",
            capacity=None,
        )
        return ThreadSharding(**values)


class ThreadGroup(dist.ProcessGroup):  # pyright: ignore[reportUntypedBaseClass]
    """The collectives that rewritten graphs and `token_mean` call, between threads.

    They go through a list with one slot per rank, and a barrier:

        slots            rank 0's tensor, rank 1's tensor
        all wait         every slot is filled
        each reads       all slots
        all wait         nobody fills a slot again before all have read
    """

    def __init__(self, size: int) -> None:
        super().__init__(0, size)
        self.barrier_ = threading.Barrier(size, timeout=300)
        self.slots: list[Any] = [None] * size

    def exchange(self, value: Any) -> list[Any]:
        """Every thread's value, in order of ranks."""
        self.slots[rank()] = value
        self.barrier_.wait()
        values = list(self.slots)
        self.barrier_.wait()
        return values

    def alltoall_base(self, output: Tensor, input: Tensor, recv: list[int], send: list[int], opts: Any = None) -> Any:
        parts = self.exchange(input.split(send))
        output.copy_(torch.cat([sent[rank()] for sent in parts]))
        return finished_work(output)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        reduce = _REDUCE[opts.reduceOp.op] if opts is not None else torch.sum
        values = self.exchange([tensor.clone() for tensor in tensors])
        for tensor, *parts in zip(tensors, *values, strict=True):
            tensor.copy_(reduce(torch.stack(parts), 0))
        return finished_work(tensors)

    def getSize(self) -> int:
        return len(self.slots)

    def getRank(self) -> int:
        return rank()

    def getBackendName(self) -> str:
        return "threads"


@contextmanager
def node_that_runs() -> Generator[None]:
    """torch notes for the whole process which node runs, and whether what is traced gets its line: threads that run
    graphs at once would leave one's for good, and later refusals would name it."""
    names = ("current_meta", "current_replay_node", "should_preserve_node_meta", "_should_preserve_node_meta")
    before = {name: getattr(traceback, name) for name in names if hasattr(traceback, name)}
    try:
        yield
    finally:
        vars(traceback).update(before)


@contextmanager
def thread_group(size: int) -> Generator[Callable[[Callable[[], Any]], list[Any]]]:
    """Ranks of a context-parallel group played by threads of this process, on the CPU: no launcher, no network. Yields
    `run(fn)`, which calls `fn` in all of them at once and returns its results by rank.

        with thread_group(2) as run:
            results = run(step)      # step() in two threads at once, where rank() is 0 and 1

    Where a thread raises, `run` raises that error: the others stop at the barrier.
    """
    group = ThreadGroup(size)

    def play(place: int, fn: Callable[[], Any]) -> Any:
        _place.rank = place
        try:
            return fn()
        except BaseException:
            group.barrier_.abort()  # the others must not wait for this one
            raise

    def run(fn: Callable[[], Any]) -> list[Any]:
        with node_that_runs(), ThreadPoolExecutor(size) as threads:
            futures = [threads.submit(play, place, fn) for place in range(size)]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        # The first that failed broke the barrier of the others.
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    with registered_group(GROUP, group):
        yield cast(Any, run)


@dataclass(frozen=True)
class CheckReport:
    """Relative differences to one process: the norm of the difference over the norm of the expected.

    Args:
        outputs: per tensor of the model's output, in global order. The loss is one of them, where there is one.
        gradients: per parameter. A gradient's norm counts as no less than a thousandth of the largest one's.
        nan: output, or `gradient of` a parameter, that holds NaN -> who gave it: one process, the ranks, or both. Its
            difference is infinite: nothing can be said of it.
    """

    outputs: Mapping[str, float]
    gradients: Mapping[str, float]
    nan: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def largest(self) -> float:
        """The largest difference of all."""
        return max([*self.outputs.values(), *self.gradients.values()], default=0.0)

    def __str__(self) -> str:
        lines = [f"largest relative difference {self.largest:.1e}"]
        lines += [f"NaN in    {name}, of {who}" for name, who in self.nan.items()]
        lines += [f"output    {name}: {error:.1e}" for name, error in self.outputs.items()]
        worst = sorted(self.gradients.items(), key=lambda item: -item[1])
        lines += [f"gradient  {name}: {error:.1e}" for name, error in worst[:5]]
        return "\n".join(lines + [f"gradient  … {len(worst) - 5} more, smaller"] * (len(worst) > 5))


def check(model: nn.Module, sharding: Sharding, batch: Mapping[str, Any], *, shift_labels: bool = False) -> CheckReport:
    """Run a copy of the model on the CPU as it is and rewritten, and compare outputs, loss and gradients.

        report = cp.check(model, cp.Sharding(4, tokens, packing), batch)

    The ranks are threads: no launcher, no process group and no GPU are needed, and the mesh may be a world size. Rows
    travel as under `exchange="needed"` with no capacity, attention runs in the reference kernel. Masks are compared too
    (`verify="first_step"`). The model that is run as it is knows nothing of `reset_states`.

    Args:
        model: called as `model(**batch)`. Its loss is the output `loss`, or else its first scalar: on a rank a part of
            the global one, or the global one itself (`token_mean`). Where there is none, the sum of the first output
            with a token dim stands for it, under fixed random weights.
        sharding: the annotation. batch: the global batch. shift_labels: as in `Sharding.shard`.
    Raises:
        TypeError: no module, no Sharding or no mapping.
        RewriteRefused, MaskMismatch, ValueError: as when the model runs.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"model must be an nn.Module, got {model!r}")
    named_values("batch", batch)
    require_sharding(sharding)
    model = copy.deepcopy(model).cpu()
    batch = {name: v.cpu() if isinstance(v, Tensor) else v for name, v in batch.items()}
    unread = untaken_args(model, sharding.packing, batch)
    runner = _Runner(model, ThreadSharding.like(sharding), batch, {"shift_labels": shift_labels, "drop": unread})
    expected = runner.step(tensors_of(model(**{name: batch[name] for name in batch if name not in unread})), None)
    # A checkpoint that stops early leaves its node's line behind as that of all nodes that are captured later.
    lines = preserve_node_meta(enable=False)
    with thread_group(sharding.world_size) as run, group_of_threads(GROUP), lines:
        runner.compile()
        ranks: list[_Step] = run(runner.rank_step)
    return _compare(expected, ranks, runner.dim)


@dataclass(frozen=True)
class _Step:
    """Outputs and gradients of one step. `plan`: of the batch that a rank has a part of; None for one process. places:
    the outputs' token dims, or axes, of those that the proof found to have some."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    plan: BatchPlan | None
    places: dict[str, int | TokenAxes]


def _compare(expected: _Step, ranks: Sequence[_Step], dim: int) -> CheckReport:
    plan = ranks[0].plan
    assert plan is not None
    pairs = {
        name: (joined([step.outputs[name] for step in ranks], value, plan, ranks[0].places.get(name, dim)), value)
        for name, value in expected.outputs.items()
        if all(name in step.outputs for step in ranks)
    }
    grads = {
        name: (sum((step.gradients[name] for step in ranks), torch.zeros(())), grad)
        for name, grad in expected.gradients.items()
    }
    floor = floor_of(expected.gradients.values())
    named = pairs | {f"gradient of {name}": pair for name, pair in grads.items()}
    return CheckReport(
        {name: difference(*pair) for name, pair in pairs.items()},
        {name: difference(*pair, floor) for name, pair in grads.items()},
        {name: who for name, pair in named.items() if (who := _who_has_nan(*pair))},
    )


def _who_has_nan(found: Tensor, expected: Tensor) -> str:
    ranks, one = (bool(x.isnan().any()) for x in (found, expected))
    return "one process and the ranks" if ranks and one else "the ranks" if ranks else "one process" if one else ""


class _Runner:
    """One model, plain and compiled.

    `how`: options of `shard`. `captured`: the compiled one is there, and its masks were compared.
    """

    def __init__(
        self, model: nn.Module, sharding: ThreadSharding, batch: Mapping[str, Any], how: Mapping[str, Any]
    ) -> None:
        self.model, self.sharding, self.batch, self.how = model, sharding, batch, how
        self.dim = next(iter(sharding.tokens.values()))
        self.captured = False
        # One process writes them first, and threads share them.
        self.buffers = {id(buffer): buffer.clone() for buffer in model.buffers()}
        self.compiled: Any = torch.compile(model, backend=self.backend, fullgraph=True)

    def backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        """Rewrite the graph for torch.compile. The first call of what it returns compares masks and stops."""
        state = passes.run_passes(capture(gm, self.sharding, active_plan(self.sharding)))
        unchecked, checks = [*state.masks], None if state.refusals else CallChecks(state)
        graph, left_out = for_eager(state.graph_module), LeftOutputs(state)

        local = passes.local_arguments(state.graph_module)

        def run(*args: Any) -> Any:
            args = local(args)
            if checks is None:
                raise RewriteRefused(state.refusals)
            if not self.captured:
                check_masks(unchecked, active_plan(self.sharding), args)
                raise _Captured
            plan = active_plan(self.sharding)
            args = tuple(self.buffers[id(x)].clone() if id(x) in self.buffers else x for x in args)
            checks.check(plan, args)
            plan_tensors = (plan.tensor(key) for key in state.inputs)
            args = tuple(checks.arguments(plan, args))
            given = graph(*args, *plan_tensors)
            out = checks.results(plan, left_out.graphs_own(given))
            left_out.put(out, given, args)
            return out

        return run

    def compile(self) -> None:
        """Compile in this thread, once for all: Dynamo is not asked by several threads at a time."""
        with suppress(_Captured), self.shard() as local:
            self.compiled(**local)
        self.captured = True

    def shard(self) -> Any:
        return self.sharding.shard(self.batch, **self.how)

    def rank_step(self) -> _Step:
        """The step of the rank that this thread plays."""
        with self.shard() as local:
            return self.step(tensors_of(self.compiled(**local)), local.plan)

    def step(self, out: dict[str, Tensor], plan: BatchPlan | None) -> _Step:
        """A step from the model's outputs: those of one process (`plan` None) or of a rank."""
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        outputs, total = {name: value.detach() for name, value in out.items()}, self.loss(out, plan)
        found = {name: token_axes_of(x) if (dim := token_dim_of(x)) is None else dim for name, x in out.items()}
        places = {name: place for name, place in found.items() if place is not None}
        if total is None or not named:
            return _Step(outputs, {}, plan, places)
        grads = torch.autograd.grad(total, list(named.values()), materialize_grads=True)
        return _Step(outputs, dict(zip(named, grads, strict=True)), plan, places)

    def loss(self, out: dict[str, Tensor], plan: BatchPlan | None) -> Tensor | None:
        """The loss that a model returns, or one that is made of its outputs."""
        scalars = [name for name, value in out.items() if value.ndim == 0 and value.requires_grad]
        if scalars:
            return out["loss" if "loss" in scalars else scalars[0]]
        size = self.batch[next(iter(self.sharding.tokens))].shape[self.dim] if plan is None else plan.local_size
        for value in out.values():
            if value.requires_grad and value.ndim > self.dim and value.shape[self.dim] == size:
                return (value * self.weights(value, plan)).sum()
        return None

    def weights(self, value: Tensor, plan: BatchPlan | None) -> Tensor:
        """A random weight per entry of an output: on a rank, those that its tokens have on one process."""
        total = self.batch[next(iter(self.sharding.tokens))].shape[self.dim]
        shape = [total if dim == self.dim else size for dim, size in enumerate(value.shape)]
        whole = torch.randn(shape, dtype=value.dtype, generator=torch.Generator().manual_seed(0))
        return whole if plan is None else cut_tokens(whole, self.dim, plan.local_indices(rank()), 0)


class _Captured(Exception):
    pass


def tensors_of(out: Any, name: str = "") -> dict[str, Tensor]:
    """Floating-point tensors of a model's output, by their path in it."""
    if isinstance(out, Tensor):
        return {name or "output": out} if out.is_floating_point() else {}
    items: Any = ()
    if isinstance(out, Mapping):
        items = out.items()
    elif isinstance(out, tuple) and hasattr(out, "_fields"):
        items = zip(out._fields, out, strict=True)  # type: ignore[attr-defined]
    elif isinstance(out, list | tuple):
        items = enumerate(out)
    return {k: v for key, part in items for k, v in tensors_of(part, f"{name}.{key}" if name else str(key)).items()}


def joined(parts: list[Tensor], expected: Tensor, plan: BatchPlan, place: int | TokenAxes) -> Tensor:
    """Ranks' outputs as one process has them: tokens, in the dim or axes of `place`, in global order, parts of a sum
    added up, equal values once.

    Equal values on all ranks may also be equal parts of a sum: the one that is nearer to `expected` is taken.
    """

    def in_order(parts: list[Tensor], dim: int) -> Tensor:
        return join_tokens(torch.cat(parts, dim), dim, plan)

    def as_first_row(parts: list[Tensor], _: int) -> Tensor:
        return in_order([x.expand(len(plan.rows), *x.shape) for x in parts], 1)[0]

    if isinstance(place, tuple):  # rows are cut alike where an output has none
        return by_axes(parts, place, plan, in_order if has_rows(place) else as_first_row)
    sizes = (plan.local_size, plan.rows[0].total)
    if expected.ndim > place and (parts[0].shape[place], expected.shape[place]) == sizes:
        return in_order(parts, place)
    if all(torch.equal(part, parts[0]) for part in parts):
        return min((parts[0], parts[0] * len(parts)), key=lambda value: difference(value, expected))
    return torch.stack(parts).sum(0)


def difference(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Norm of the difference over the norm of the expected. Infinite for other shapes, and for NaN in either; entries
    that are equal and infinite count as 0 in both."""
    if actual.shape != expected.shape:
        return float("inf")
    a, b = actual.detach().double(), expected.detach().double()
    same = (a == b) & a.isinf()
    a, b = a.masked_fill(same, 0), b.masked_fill(same, 0)
    norm, error = max(float(b.norm()), floor), float((a - b).norm())
    found = error / norm if norm else error
    return found if found == found else float("inf")


def floor_of(gradients: Iterable[Tensor]) -> float:
    """A thousandth of the largest norm: one that is zero in exact arithmetic is the rounding of terms that cancel."""
    norms = [float(grad.double().norm()) for grad in gradients]
    return 1e-3 * max((norm for norm in norms if math.isfinite(norm)), default=0.0)
