"""The torch.compile backend: capture, run the passes, compile what they made, feed it the plan of each batch."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend, register_backend

from cp_rewrite.agree import heartbeat
from cp_rewrite.batch.active import active_plan, check_not_traced, note_sites
from cp_rewrite.batch.marks import number_tokens
from cp_rewrite.batch.steps import WeightWatch, end_with_batch, watch_backward
from cp_rewrite.batch.tokens import gathered, map_tensors
from cp_rewrite.calls.check_calls import AgreedInputs, CallChecks, check_rope
from cp_rewrite.calls.compare_masks import check_masks
from cp_rewrite.calls.left_out import Input, LeftOutputs
from cp_rewrite.diagnose.check_op import SpotCheck
from cp_rewrite.passes.capture.capture import capture, for_eager, look_like_row
from cp_rewrite.passes.graph.diff import graph_lines
from cp_rewrite.passes.graph.dynamo import unwrapped
from cp_rewrite.passes.graph.nodes import written_memory
from cp_rewrite.passes.plan_sites import most_of, traffic_of
from cp_rewrite.passes.rewrite.inputs import take_snapshots
from cp_rewrite.passes.values.sizes import PlanConditions
from cp_rewrite.segments.compiled import compile_once, equal_blocks, in_order

from . import passes
from .agree import turns
from .calls import observe
from .packing import untaken_args
from .refusal import RewriteRefused
from .sharding import Sharding, require_sharding
from .torch_internals import hint

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])


class Backend:
    """A torch.compile backend for one Sharding. Equal for equal annotations, so that calls do not recompile.

    `loss_alone`: the caller reads no output beside a loss, so that wide ones are left out whatever the annotation says.
    """

    def __init__(self, sharding: Sharding, loss_alone: bool = False) -> None:
        self.sharding, self.loss_alone = sharding, loss_alone
        self._lengths: dict[int, None] = {}
        """Tokens of the rows whose graphs were right."""
        observe.listen()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Backend) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        return (self.loss_alone, *self.sharding.graph_key)

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        try:
            patches = _inductor_options(self.sharding, mode, options or {})
            state, number = self._agreed(gm)
        except Exception as error:
            raise unwrapped(error) from error.__cause__
        if state.refusals:
            refused = self._refused(state)
            if self.sharding.strict:
                raise unwrapped(refused)
            passes.guard_size_conditions(state)
            warnings.warn(f"{refused}\nstrict=False: the graph runs as it is, on this rank's tokens only", stacklevel=2)
            look_like_row(gm)
            passes.give_local_sizes(gm)
            local = passes.local_arguments(gm)
            compiled = self._inner(gm, passes.local_examples(gm, example_inputs), patches)
            return lambda *args: compiled(*local(args))
        nodes = state.graph_module.graph.find_nodes(op="placeholder")
        added = nodes[len(nodes) - len(state.inputs) :]
        extra = [node.meta["example_input"] for node in added]
        given = passes.local_examples(state.graph_module, example_inputs)
        compiled = self._inner(state.graph_module, [*given, *extra], patches)
        left_out = LeftOutputs(state, self._weight)
        return _checked(state, number, compiled, PlanConditions(nodes[: len(nodes) - len(added)], added), left_out)

    def _refused(self, state: passes.State) -> RewriteRefused:
        tokens = state.plan.plan.rows[0].total
        return RewriteRefused(state.refusals, tokens, [n for n in self._lengths if n != tokens])

    def _weight(self, node: fx.Node) -> Input | None:
        """How an input of a graph is read once the call is over, where it is none of the call's arguments."""
        return None

    def _agreed(self, gm: fx.GraphModule) -> tuple[passes.State, int]:
        """State with the rewritten graph, or refusals, and the graph's number, 0 if refused: the same on all ranks."""
        sharding = self.sharding
        observe.trace("before", lambda: graph_lines(gm))
        try:
            with observe.progress("proof"):
                state = self._rewritten(gm)
        except Exception as error:
            turns.on_failure(sharding, "graph", error)
            raise
        observe.count(state)
        if state.decisions and not state.refusals and sharding.world_size > 1:
            _ = sharding.group  # raises where the mesh is a world size, for dry runs only
        if state.refusals:
            refused = self._refused(state)
            observe.trace("refused", lambda: [str(refused)])
            if sharding.strict:
                turns.on_failure(sharding, "graph", refused)
            else:
                turns.on_graph(sharding, "refused")  # ranks may refuse in other words: counts differ
            return state, 0
        text = graph_lines(state.graph_module)
        observe.trace("after", lambda: text)
        number = turns.on_graph(sharding, "\n".join(text))
        self._lengths[state.plan.plan.rows[0].total] = None
        if (most := most_of(state.decisions, sharding.balanced_mask)) is not None:
            note_sites(sharding, *most)
        return state, number

    def _rewritten(self, gm: fx.GraphModule) -> passes.State:
        check_rope(self.sharding)
        state = capture(gm, self.sharding, active_plan(self.sharding), self.loss_alone)
        for found in state.tokens.inputs:
            state.plan.handed.check_tokens(found.name, found.value, found.dim, hint(found.local))
        return passes.run_passes(state)

    def _inner(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], patches: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """The callable that runs a graph, its equal blocks compiled once; `patches`: options of Inductor."""
        compile_one, written = functools.partial(self._compiled, patches=patches), written_memory(gm)
        if (parts := equal_blocks(gm, example_inputs, written)) is not None:
            return in_order(gm, compile_once(gm, parts, compile_one, written))
        take_snapshots(gm, written)
        with observe.progress("compile"):
            return compile_one(gm, example_inputs)

    def _compiled(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], patches: Mapping[str, Any]
    ) -> Callable[..., Any]:
        compile_inner = cast(Callable[..., Callable[..., Any]], lookup_backend(self.sharding.inner))
        options = {"config_patches": dict(patches)} if patches else {}
        with observe.cache_key(self.sharding):
            gm = for_eager(gm) if self.sharding.inner == "eager" else gm
            return compile_inner(gm, list(example_inputs), **options)


def backend(sharding: Sharding) -> Backend:
    """The backend for `torch.compile(model, backend=cp_rewrite.backend(sharding), fullgraph=True)`.

    `mode` and `options` of torch.compile are passed on to Inductor. The compiled model is called inside of a batch's
    block, with what `sharding.shard(batch)` gives.

    Raises:
        TypeError: no Sharding. The compiled model raises RewriteRefused (strict), MaskMismatch, ValueError for tokens
            of another batch, RuntimeError outside of a batch's block or where ranks differ.
    """
    return Backend(require_sharding(sharding))


@register_backend(name="cp_rewrite")  # type: ignore[arg-type]
def compile_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend that `torch.compile(model, backend="cp_rewrite", options={"sharding": sharding, "mode": …})` calls.

    torch.compile takes no `mode` beside `options`: it stands among them. Others are Inductor's.
    """
    others = dict(options or {})
    sharding, mode = others.pop("sharding", None), others.pop("mode", mode)
    if not isinstance(sharding, Sharding):
        error = TypeError(f"backend='cp_rewrite' needs options={{'sharding': cp_rewrite.Sharding(...)}}, got {options}")
        raise unwrapped(error)
    return Backend(sharding)(gm, example_inputs, mode=mode, options=others)


def _inductor_options(sharding: Sharding, mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of Inductor that torch.compile's `mode` and `options` stand for; {} where neither is given.

    Raises:
        ValueError: another compiler runs, Inductor does not know them, or they capture CUDA graphs.
    """
    if not (mode or options):
        return {}
    if sharding.inner != "inductor":
        raise ValueError(
            f"torch.compile's mode and options are for inner='inductor', not for {sharding.inner!r}: got "
            f"{mode or dict(options)!r}"
        )
    if mode and mode not in (known := torch._inductor.list_mode_options()):
        raise ValueError(f"mode must be one of {', '.join(known)}; got {mode!r}")
    if unknown := sorted(set(options) - set(torch._inductor.list_options())):
        raise ValueError(f"options has unknown keys {unknown}: they are 'sharding', 'mode' and what Inductor knows")
    patches = {**(torch._inductor.list_mode_options(mode) if mode else {}), **options}
    if patches.get("triton.cudagraphs"):
        raise ValueError(
            f"{mode or 'triton.cudagraphs'!r} captures a CUDA graph for every size of a batch: pass "
            "'max-autotune-no-cudagraphs', or capture a whole step once, with Sharding(capacity=...)"
        )
    return patches


def context_parallel(sharding: Sharding, *, gather_outputs: bool = False) -> Callable[[F], F]:
    """Decorator for a forward method, a function or a module: it takes the global batch by keyword, and runs sharded.

    Args:
        sharding: the annotation; every name in `tokens` must be passed by keyword. What tells documents apart need
            not be an argument of the target.
        gather_outputs: return tensors that the proof finds to carry tokens in global order, wherever their dims have
            these.
            Without it outputs are this rank's. Labels are not shifted: give the model labels that are.
    Raises:
        TypeError: no Sharding; a class, or what was decorated before; tokens passed by place.
    """
    made_by = backend(sharding)

    def decorate(target: F) -> F:
        if isinstance(target, nn.Module):
            target.forward = decorate(target.forward)  # type: ignore[method-assign]
            return target  # type: ignore[return-value]
        if isinstance(target, type) or not callable(target):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"context_parallel decorates a function, a forward method or a module, got {target!r}")
        if hasattr(target, "_cp_rewrite_sharding"):
            raise TypeError(f"{target.__qualname__} is context-parallel already")
        compiled = torch.compile(target, backend=made_by, fullgraph=True)

        @functools.wraps(target)
        def call(*args: Any, **kwargs: Any) -> Any:
            check_not_traced()
            values = {name: value for name, value in kwargs.items() if value is not None}
            missing = [name for name in sharding.tokens if name not in values]
            if missing and any(isinstance(value, Tensor) for value in args):
                raise TypeError(f"{target.__qualname__} is context-parallel: pass {', '.join(missing)} by keyword")
            unread = untaken_args(target, sharding.packing, values)
            others = {name: value for name, value in kwargs.items() if name not in unread}
            with sharding.shard(values, drop=unread) as local:
                out = compiled(*args, **{**others, **local})
            return _gathered(out, sharding) if gather_outputs else out

        call._cp_rewrite_sharding = sharding  # type: ignore[attr-defined]
        return cast(F, call)

    return decorate


def _checked(
    state: passes.State, number: int, compiled: Callable[..., Any], sizes: PlanConditions, left_out: LeftOutputs
) -> Callable[..., Any]:
    """The callable of a graph: it checks arguments against the batch in flight, and runs it with that batch's plan."""
    sharding, keys, checks = state.sharding, state.inputs, CallChecks(state)
    unchecked, agreed = list(state.masks), AgreedInputs(state)
    weights, vouched = WeightWatch(sharding, agreed.weights), SpotCheck.of(state)
    traffic = [traffic_of(decision) for decision in state.decisions]

    local = passes.local_arguments(state.graph_module)

    def run(*args: Any) -> Any:
        args = local(args)
        plan = active_plan(sharding)
        plan.sites += traffic
        with agreed.or_failed(sharding):
            checks.check(plan, args)
        agreed.compare(plan, args)
        weights.before(args)
        trained = weights.parameters(args)
        if unchecked:
            check_masks(unchecked, plan, args)
            if sharding.verify != "every_step":
                unchecked.clear()
        args = (*checks.arguments(plan, args), *(plan.tensor(key) for key in keys))
        sizes.check(args)
        call = heartbeat.note_call(sharding.group_name, number)
        given = vouched.call(compiled, args)
        out = checks.results(plan, left_out.graphs_own(given))
        weights.after()
        end_with_batch(sharding, plan.handed.number, out)
        watch_backward(sharding, call, trained, out)
        left_out.put(out, given, args)
        for value in out:
            # With a capacity a CUDA graph may write other batches' outputs into the same tensors.
            if isinstance(value, Tensor) and sharding.capacity is None:
                number_tokens(value, plan.handed.number)
        return out

    return run


def _gathered(out: Any, sharding: Sharding) -> Any:
    """Outputs whose tokens, by the proof, are this rank's, in global order; others as they are."""

    return map_tensors(functools.partial(gathered, sharding), out)
