"""The forward of a model whose weights FSDP shards, block by block: one proven graph, run in segments.

    Dynamo traces the twin ─ passes prove and rewrite the whole graph ─ cut_graph ─ each segment is compiled

    root.forward ─ root's segment ─ block 0(segment) ─ block 1(segment) ─ … ─ root's segment

Each segment of a block runs inside a call of the block, so that FSDP's hooks gather its weights before and drop them
after it, in the backward too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from cp_rewrite import passes
from cp_rewrite.batch.stand_in import gone
from cp_rewrite.calls.left_out import SHARDS_AGAIN, Input, Read, as_given
from cp_rewrite.entry import Backend
from cp_rewrite.experts.layers import OWNED, SharedExperts, SharedWeight, local_weight
from cp_rewrite.passes.graph.dynamo import input_value
from cp_rewrite.passes.graph.nodes import graph_modules, value_of, written_memory
from cp_rewrite.refusal import BACKWARD_HOOKS
from cp_rewrite.segments.compiled import SegmentCall, compile_once, described, in_order
from cp_rewrite.segments.cut import ROOT, cut_graph
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import fake_mode_of, memory_id

from .held import check_written
from .offload import HostStore
from .twin import Twin, without_memory

_FORWARD = ("_forward_pre_hooks", "_forward_hooks")
_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
_sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Blocks and models whose weights FSDP shards."""


def shard_weights(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    resharded: Collection[nn.Module],
    divide_by: float,
    offload: OffloadPolicy | None = None,
    shared: SharedExperts | None = None,
) -> nn.Module:
    """`fully_shard` of blocks and of the model, over a mesh of one dim, or over the second of two, with copies over the
    first. `resharded`: the blocks whose weights are dropped after their forward. The sums of gradients are divided by
    `divide_by`. `offload`: where weights lie between their uses. `shared`: layers whose experts are cut already."""
    for name, weight in model.named_parameters():
        if weight._backward_hooks or weight._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            raise ValueError(f"{name} has a hook, which FSDP would lose with the tensor: put it on the sharded weight")
    # What crosses from block to block has the dtype that the model gave it.
    inner = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, None, cast_forward_inputs=False)
    placement: dict[str, Any] = {} if shared is None else shared.placement()
    shard = functools.partial(fully_shard, mesh=mesh, offload_policy=offload or OffloadPolicy(), **placement)
    for block in blocks:
        skip_hooks(block, lambda value: isinstance(value, _Segment))
        shard(block, mp_policy=inner, reshard_after_forward=block in resharded)
        _run_segments_in(block)
    shard(model, mp_policy=policy)
    for module in (model, *blocks):
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(divide_by)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        _sharded.add(module)
    between = _BetweenCalls(model, blocks)
    model.register_forward_pre_hook(between.before, prepend=True)
    model.register_forward_hook(between.behind, always_call=True)
    return model


class _BetweenCalls:
    """The weights of a model that FSDP shards, where a call begins and ends.

    before a first call in inference mode    all are gathered once outside of it: FSDP keeps the tensors of its first
                                             gather, and could not write to those of inference mode in a training step
    behind a call with autograd off          they are dropped: no backward follows, which would do that
    behind another                           what is whole must not be written to: shards never have it
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._sharded: list[Any] = [model, *blocks]
        self._gathered = False
        self._places = [(m._parameters, name, f"{of}.{name}" if of else name)
                        for of, m in model.named_modules() for name in m._parameters]  # fmt: skip
        self._whole: list[tuple[str, Tensor, int]] = []
        """Names, weights that the last call left whole, and torch's count of writes to each."""

    def before(self, *_: Any) -> None:
        """Raise a RuntimeError where a weight was written to while it was whole."""
        written = next((name for name, weight, count in self._whole if weight._version != count), None)
        self._whole.clear()
        if written is not None:
            raise RuntimeError(
                f"cp_rewrite: {written} was written to between a call of the model and its backward, where FSDP has it "
                "whole, and is lost: write to weights behind the backward, or behind model.reshard() where none comes, "
                "or call the model under torch.no_grad()"
            )
        if torch.is_inference_mode_enabled() and not self._gathered:
            self._gathered = True
            with torch.inference_mode(False), torch.no_grad():
                for module in self._sharded:
                    module.unshard()
                    module.reshard()

    def behind(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            drop_whole_weights(self._sharded)
            return
        held = ((name, own.get(key)) for own, key, name in self._places)
        self._whole = [(name, p, p._version) for name, p in held if p is not None and not isinstance(p, DTensor)]


def drop_whole_weights(sharded: Iterable[nn.Module] = _sharded) -> None:
    """Reshard what calls without a backward left whole, since FSDP would not gather it again: for before weights
    change."""
    for module in sharded:
        assert isinstance(module, FSDPModule)
        module.reshard()


def compile_segments(
    call: Callable[..., Any],
    twin: Twin,
    blocks: Sequence[nn.Module],
    sharding: Sharding,
    store: HostStore | None = None,
    loss_alone: bool = False,
    prefetch: int = 0,
) -> Callable[..., Any]:
    """`call` of the twin or of a module of it, compiled to run on the weights of the model that `blocks` are of.
    `store`: where what blocks keep of their inputs goes. `prefetch`: how many blocks' weights are asked for ahead; 0:
    as FSDP does by itself. `loss_alone` as of `Backend`."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    # What Dynamo compiles hangs on the code, and is counted there: each model has code of its own.
    traced.__code__ = traced.__code__.replace()
    made_by = SegmentBackend(sharding, twin, blocks, store, loss_alone, prefetch)
    compiled = torch.compile(traced, backend=made_by, fullgraph=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        twin.follow()
        made_by.calls += 1
        outputs = twin.read_once.call(lambda: compiled(*args, **kwargs))
        if made_by.keeps:
            twin.hand_back()
        return outputs

    return run


_Owner = tuple[weakref.ref[nn.Module], str]
"""The module of the model that holds a weight, and the weight's name there."""
_Near = tuple[list[weakref.ref[nn.Module]], list[weakref.ref[nn.Module]]]
"""Blocks whose weights a block asks for: in its forward, and in its backward."""


class SegmentBackend(Backend):
    """The backend of a twin. Its graphs run on the weights of the model, in the calls of the model's blocks.

    It holds neither: Dynamo keeps what it compiled, and a model must go with its last user.
    """

    def __init__(
        self,
        sharding: Sharding,
        twin: Twin,
        blocks: Sequence[nn.Module],
        store: HostStore | None = None,
        loss_alone: bool = False,
        prefetch: int = 0,
    ) -> None:
        super().__init__(sharding, loss_alone)
        self.blocks, self.store, self.calls, self.prefetch = [*map(weakref.ref, blocks)], store, 0, prefetch
        self._read_once, self._pairs = twin.read_once, twin.pairs
        self.keeps = False
        """True: a graph leaves something on modules of the twin."""
        # 0 is the root. Of a weight that two blocks share FSDP makes the root's.
        units = {module: i for i, block in enumerate(blocks, 1) for module in block.modules()}
        self._owners: dict[int, tuple[_Owner, int]] = {
            key: ((weakref.ref(module), name), units.get(module, ROOT))
            for key, (_, module, name) in twin.owners.items()
        }

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def _rewritten(self, gm: fx.GraphModule) -> passes.State:
        with self._read_once.trial() as once:
            self.keeps |= check_written(self._pairs)
            state = super()._rewritten(gm)
            self._read_once.accept(state.refusals)
            return passes.instantiated(state) if once else state

    def _inner(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], patches: Mapping[str, Any]
    ) -> Callable[..., Any]:
        placeholders = gm.graph.find_nodes(op="placeholder")
        example_inputs = own_parts(gm, example_inputs)
        weights = {node: self._owner(node) for node in placeholders if isinstance(value_of(node), nn.Parameter)}
        owners = {node: owner for node, (owner, _) in weights.items()}
        segments = cut_graph(gm, {node: unit for node, (_, unit) in weights.items()})
        written = written_memory(gm)
        parts = described(gm, segments, example_inputs, written)
        calls = compile_once(gm, parts, functools.partial(self._compiled, patches=patches), written)
        last = max((i for i, call in enumerate(calls) if call.unit != ROOT), default=0)  # what it keeps is read next
        stores = [self.store if i < last and call.unit != ROOT else None for i, call in enumerate(calls)]
        around = self._prefetched([call.unit for call in calls])
        found = zip(calls, stores, around, strict=True)
        return in_order(gm, [self._in_block(call, owners, store, near) for call, store, near in found])

    def _prefetched(self, units: Sequence[int]) -> list[_Near]:
        """The blocks that run next after each segment, and those that run last before it."""

        def first(others: Iterable[int], unit: int) -> list[weakref.ref[nn.Module]]:
            return [self.blocks[n - 1] for n in dict.fromkeys(others) if n not in (ROOT, unit)][: self.prefetch]

        return [(first(units[i + 1 :], unit), first(units[:i][::-1], unit)) for i, unit in enumerate(units)]

    def _in_block(
        self, call: SegmentCall, owners: Mapping[fx.Node, _Owner], store: HostStore | None, near: _Near
    ) -> SegmentCall:
        """The call inside of one of its block, with inputs but for weights."""
        segment = _Segment(call, owners, store)
        run = segment if call.unit == ROOT else functools.partial(_call, self.blocks[call.unit - 1], near, segment)
        inputs, done = ((tuple(n for n in nodes if n not in owners)) for nodes in (call.inputs, call.done))
        return replace(call, inputs=inputs, done=done, run=run)

    def _weight(self, node: fx.Node) -> Input | None:
        """A weight of the model: it is whole between the forward and the backward, where it is in no block. A call with
        autograd off leaves a copy."""
        value = value_of(node)
        if not isinstance(value, nn.Parameter):
            return None
        (module, name), _ = self._owner(node)
        device, dtype = value.device, value.dtype

        def of_call(_: Sequence[Any]) -> Read:
            call, held = self.calls, _held(module, name)
            if not torch.is_grad_enabled():
                copied = held.full_tensor().to(device, dtype) if isinstance(held, DTensor) else held.detach().clone()
                return lambda: copied
            as_it_was = None if isinstance(held, DTensor) else as_given(held)

            def read() -> Tensor:
                if self.calls != call:
                    raise gone("the model was called again since")
                if as_it_was is None or isinstance(_held(module, name), DTensor):
                    raise gone(SHARDS_AGAIN)
                return as_it_was()

            return read

        return of_call

    def _owner(self, node: fx.Node) -> tuple[_Owner, int]:
        """Who holds a weight of the twin in the model, and the number of its block."""
        value = input_value(node)
        if id(value) not in self._owners:
            raise ValueError(
                f"{node.name} is a weight that no module of the model holds, or that is reached past its modules (by a "
                "function's closure, a weak reference): make it a parameter of a module before parallelize, and read "
                "it there"
            )
        return self._owners[id(value)]


def _call(block: weakref.ref[nn.Module], near: _Near, *args: Any) -> Any:
    """Call a block, with weights of blocks near it asked for. In a forward, only in this call: what FSDP gathers for a
    block that does not run stays whole, and misses the optimizer's step."""
    module: Any = _alive(block)
    if near == ([], []):
        return module(*args)
    after, before = ([*map(_alive, blocks)] for blocks in near)
    module.set_modules_to_forward_prefetch(after)
    module.set_modules_to_backward_prefetch(before)
    try:
        return module(*args)
    finally:
        module.set_modules_to_forward_prefetch([])


def _held(module: weakref.ref[nn.Module], name: str) -> Tensor:
    found = _alive(module)._parameters[name]
    assert found is not None, "a weight that was traced is there"
    return found


def _alive(module: weakref.ref[nn.Module]) -> nn.Module:
    found = module()
    assert found is not None, "a model is there while it is called"
    return found


class _Segment:
    """A compiled segment. Called with its inputs but for weights, which it reads off the model's modules itself.

    `store`: where what the backward reads of its inputs goes; None: it stays.
    """

    def __init__(self, call: SegmentCall, owners: Mapping[fx.Node, _Owner], store: HostStore | None) -> None:
        self._run, self._store = call.run, store
        self._weights = [owners.get(node) for node in call.inputs]

    def __call__(self, *inputs: Any) -> Any:
        rest = iter(inputs)
        operands = [local_weight(_alive(w[0]), _held(*w)) if w is not None else next(rest) for w in self._weights]
        with nullcontext() if self._store is None else self._store.holding(inputs):
            return self._run(*operands)


def own_parts(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Example inputs for the compiler of a graph: weights that ranks share, which passes read whole, are this rank's
    part in them. Nodes that are such weights, in nested regions too, get its size."""
    given, found = list(example_inputs), dict[int, Tensor]()
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")[: len(given)]):
        part: SharedWeight | None = getattr(input_value(node), OWNED, None)
        if part is not None:
            whole = value_of(node)
            given[i] = found[memory_id(whole)] = without_memory(whole, part.shape, part.dtype, whole.device)
    mode = fake_mode_of(gm.graph.nodes)
    for module in graph_modules(gm) if found else ():
        for node in module.graph.find_nodes(op="placeholder"):
            if isinstance(value_of(node), Tensor) and (own := found.get(memory_id(value_of(node)))) is not None:
                assert mode is not None, "a graph of a model has tensors"
                node.meta["example_value"] = mode.from_tensor(own)
    return given


def _run_segments_in(block: nn.Module) -> None:
    """Let a block run what it is called with, where that is a segment."""
    plain = block.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return args[0](*args[1:]) if args and isinstance(args[0], _Segment) else plain(*args, **kwargs)

    block.forward = forward


def skip_hooks(block: nn.Module, is_segment: Callable[[Any], bool]) -> None:
    """Let the hooks that a block has before FSDP shards it pass over calls whose first argument is a segment.

    The twin has copies of them, which are traced: a segment that runs inside a call of the block must not run them once
    more, on what crosses between segments.

    Raises:
        ValueError: it has hooks of the backward, which is the segments' own.
    """
    if any(getattr(block, kind) for kind in _BACKWARD):
        raise ValueError(
            f"a {type(block).__name__} has a hook of its backward, which would see the gradients of a segment of the "
            f"graph: {BACKWARD_HOOKS}"
        )

    def outside(hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def run(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
            return None if args and is_segment(args[0]) else hook(module, args, *rest)

        return run

    for kind in _FORWARD:
        hooks = getattr(block, kind)
        for number, hook in hooks.items():
            hooks[number] = outside(hook)
