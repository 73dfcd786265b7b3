"""A model for training on many processes: its weights sharded or copied, its tokens cut, its gradients right.

mesh (dp, cp) = (2, 2)      rank 0    1    2    3
rows of the batch                a    a    b    b
tokens of them                   a0   a1   b0   b1       `sharding.shard`
weights, gradients               1/4  2/4  3/4  4/4      FSDP2, over all ranks; DDP: whole on each
loss                             a    a    b    b

whole, scaled                    outputs with the values of one process, and gradients for what averages over ranks
drop_checkpoint_hooks            hooks that libraries put on models whose blocks are checkpointed, taken out
watch_optimizers, watch_steps,   checks of ranks between calls of a model whose weights FSDP shards
watch_encoders
parallelize                      all of it
clip_grad_norm_                  the norm of gradients on two meshes
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cp_rewrite.agree import heartbeat, turns
from cp_rewrite.arguments import whole_number
from cp_rewrite.batch import steps as later
from cp_rewrite.batch.active import check_not_traced, in_batch
from cp_rewrite.batch.encoders import has_encoders, images_of
from cp_rewrite.batch.gradients import note_summed, summed
from cp_rewrite.batch.marks import is_part
from cp_rewrite.batch.stand_in import StandIn
from cp_rewrite.batch.steps import begun_from
from cp_rewrite.batch.tokens import map_tensors
from cp_rewrite.entry import backend
from cp_rewrite.experts.choose import ExpertRanks, choose
from cp_rewrite.experts.layers import SharedExperts, check_size
from cp_rewrite.segments.blocks import find_blocks
from cp_rewrite.sharding import Sharding, device_of, require_sharding
from cp_rewrite.torch_internals import copied_over_first, root_mesh

from .offload import HostStore
from .sharded_forward import compile_segments, drop_whole_weights, shard_weights
from .twin import Twin, Unchanged, refuse_copies, refuse_whole_weights

_SMALL = 1 << 16
"""Entries up to which an output is copied: losses and statistics, which training loops change in place."""


def whole(value: Tensor, sharding: Sharding) -> Tensor:
    """An output with the value that one process has, if it is a sum over tokens. Its gradient is this rank's part."""
    return summed(value, sharding) if is_part(value) else value


def scaled(value: Tensor, factor: int) -> Tensor:
    """The same with `factor` times its gradient.

    A new tensor, as other outputs may be computed from the given one. The factor is a node of autograd, which no later
    op can pass by: an op in place on a small output (`loss *= weight`) follows it; on a large one, which shares the
    memory of the given tensor, it is an error of torch.
    """
    if factor == 1 or not value.requires_grad or isinstance(value, StandIn):  # whose gradient is an error
        return value
    out: Tensor = _Scale.apply(value, factor)  # type: ignore[assignment]
    vars(out).update(vars(value))  # what is known of its tokens
    return out


class _Scale(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: int) -> Tensor:  # type: ignore[override]
        ctx.factor = factor
        return value.clone() if value.numel() <= _SMALL else value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None


_CHECKPOINT_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
"""Names in `transformers`, PEFT and TRL. Reentrant checkpoints of frozen models have no gradients without the hooks."""


def drop_checkpoint_hooks(model: nn.Module) -> None:
    """Take hooks out by which `transformers`, PEFT and TRL give reentrant checkpoints of frozen models gradients, and
    let no more come. Each time that checkpointing is switched on, as TRL does in every step, one is added: a graph is
    guarded by how many there are, and can't hold one on frozen embeddings.
    """
    for module in model.modules():
        for number, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__name__", "") in _CHECKPOINT_HOOKS:
                del module._forward_hooks[number]
        if hasattr(module, "enable_input_require_grads"):
            module.enable_input_require_grads = _nothing  # type: ignore[assignment]


def _nothing() -> None:
    return None


@functools.cache
def watch_optimizers() -> None:
    """Once in a process: torch's hook is for all optimizers."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Before any optimizer's step: an evaluation behind the backward left weights whole, which the next forward would
    take for those of the step. bitsandbytes' kernels take no shards, and torch would say so of a mix of tensors."""
    drop_whole_weights()
    weights = (p for group in optimizer.param_groups for p in group["params"])
    if type(optimizer).__module__.startswith("bitsandbytes") and any(isinstance(p, DTensor) for p in weights):
        raise RuntimeError(
            f"cp_rewrite: {type(optimizer).__name__} of bitsandbytes takes no sharded weights: torchao.optim has "
            "AdamW8bit, which does; or data_parallel='ddp'"
        )


_AT_ONCE = 8
"""Weights that are looked at."""


def watch_steps(model: nn.Module, sharding: Sharding) -> None:
    """Before each call in a batch, ahead of FSDP's own: note that it begins, and have compared whether weights were
    changed since the call before, and how often gradients were. No value is read.

    FSDP's collectives meet in no graph, and what a rank leaves out shows in no other rank's weights.
    """
    steps = _Steps(model)

    def begin(*_: Any) -> None:
        if in_batch():
            heartbeat.note_start(sharding.group_name)
            if later.watched(sharding) and torch.is_grad_enabled():
                later.add(sharding, _check_steps, "", torch.tensor(steps.look(), dtype=torch.float64))

    model.register_forward_pre_hook(begin, prepend=True)


class _Steps:
    """The state that a sharded model's weights were in."""

    def __init__(self, model: nn.Module) -> None:
        places = [(module._parameters, name) for module in model.modules() for name in module._parameters]
        trained = [(own, name) for own, name in places if (p := own[name]) is not None and p.requires_grad]
        self._places = trained[:: math.ceil(len(trained) / _AT_ONCE) or 1]
        self._before: list[tuple[int, int]] | None = None

    def look(self) -> tuple[float, float, float]:
        """(whether weights were changed, how many have gradients, how often these were written)."""
        # Those of the root are whole between a forward and its backward.
        found: list[Any] = [own[name] for own, name in self._places if isinstance(own[name], DTensor)]
        now = [(id(p), p._version) for p in found]
        grads = [p.grad for p in found if isinstance(p.grad, Tensor)]
        changed = self._before is not None and now != self._before
        self._before = now
        return float(changed), float(len(grads)), float(sum(grad._version for grad in grads))


def _check_steps(_: str, ranks: list[list[float]]) -> None:
    stepped = [changed for changed, *_ in ranks]
    if len(set(stepped)) > 1:
        skipped = [rank for rank, changed in enumerate(stepped) if not changed]
        raise RuntimeError(
            f"cp_rewrite: ranks {skipped} of the group did not change their shards of the weights before a call of "
            "which others did: optimizer.step() is for all ranks or for none: skip a step by what is equal on all"
        )
    if len({(count, written) for _, count, written in ranks}) > 1:
        raise RuntimeError(
            "cp_rewrite: gradients that ranks had before a call are not of the same steps (how many, and how often "
            f"each was written: {', '.join(f'{count:.0f} and {written:.0f}' for _, count, written in ranks)}): zero "
            "gradients, clip and scale them on all ranks or on none"
        )


def watch_encoders(model: nn.Module, mesh: DeviceMesh, sharding: Sharding) -> None:
    """Before each call, where several groups of ranks share the weights: raise on all ranks if some groups have images,
    or videos, and others have none. FSDP gathers the encoder's weights, and sums its gradients, on all ranks or none.

    mesh: of all ranks, of one dim.
    """
    encoders = [module for module in model.modules() if has_encoders(module)]
    if mesh.size() == sharding.world_size or not encoders:
        return
    group, names = mesh.get_group(), images_of(encoders[0])

    def begin(_: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        given = torch.tensor([kwargs.get(name) is not None for name in names], device=device_of(sharding)).int()
        found = torch.stack([given, 1 - given])
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
        mixed = [name for name, both in zip(names, found.sum(0).tolist(), strict=True) if both > 1]
        if mixed:
            raise RuntimeError(
                f"cp_rewrite: some groups of ranks have {' and '.join(mixed)} in this step, and others have none: with "
                "FSDP all have, or none (a small image whose tokens are no targets will do), or data_parallel='ddp'"
            )

    model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)


DataParallel = Literal["fsdp", "ddp"]
Offload = Literal["checkpoints", "weights"]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    sharding: Sharding,
    *,
    data_parallel: DataParallel = "fsdp",
    blocks: Sequence[nn.Module] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | Iterable[nn.Module] = True,
    prefetch: int | None = None,
    replicate: str | Sequence[str] = (),
    offload: Collection[Offload] = (),
    experts: ExpertRanks = 1,
) -> nn.Module:
    """Shard a model's weights over a mesh (FSDP2), or copy them (DDP), and make it context-parallel: compiled, proven.

        model = cp.parallelize(model, mesh, sharding)
        optimizer = torch.optim.AdamW(model.parameters())
        with sharding.shard(batch, shift_labels=True) as local:
            loss = model(**local).loss     # of the group's whole batch
        loss.backward()                    # gradients: summed over the group's ranks, averaged over groups

    The whole model is one proven graph. With FSDP it runs in segments, one for each block: its weights are gathered
    before it and dropped after it, in forward and backward. Outputs that are sums over tokens, as a loss is, come back
    summed over the group; per-token outputs are this rank's. Outside of a batch's block, under `torch.no_grad()`, the
    model is the plain one, on whole rows.

    Changes of the forward (adapters, gradient checkpointing, dtypes) come before; the optimizer comes after.

    Args:
        model: with its weights, on any device, or on `meta`: call `to_empty(device=…)` and set weights and buffers
            afterwards.
        mesh: of all processes that train this model: its dims are those of `sharding.mesh` and data-parallel ones.
        sharding: the annotation, over some dims of `mesh`.
        data_parallel: `fsdp` shards weights, gradients and optimizer states over all ranks of `mesh`. `ddp` keeps a
            whole copy on each, and returns DDP's wrapper.
        blocks: modules whose weights are gathered together; () for none but the model itself. None: the entries of
            the model's lists of modules (its layers).
        mp_policy: FSDP's mixed precision. Inputs of blocks are not cast: `cast_forward_inputs` is for the root alone.
            Gradients are summed in `reduce_dtype`, or where that is None in `param_dtype`.
        reshard_after_forward: drop a block's weights after its forward, and gather them again for its backward. False:
            all stay until their backward, in the forward's dtype. Or the blocks whose weights are dropped.
        prefetch: how many blocks' weights are asked for ahead of their use, in the order in which blocks run, forward
            and backward. None: FSDP's own way, the next block's once it is called, in the backward one ahead.
        replicate: the first dim of `mesh`, or some of the first, by name: each of its ranks has all weights, sharded
            over the ranks of the other dims (HSDP). Gradients are summed over the others, then over these.
        offload: what lies on the host between its uses, with FSDP. `checkpoints`: what blocks keep of their inputs for
            the backward, all that is kept where blocks are checkpointed. `weights`: this rank's shards, their gradients
            and the optimizer's states, by FSDP's CPUOffloadPolicy; the mesh then needs a backend for CPU tensors too
            (`init_process_group("cpu:gloo,cuda:nccl")`) for norms of gradients.
        experts: how many consecutive ranks of `mesh`, its dims joined, share one set of experts, with FSDP: each has
            some of them, and tokens go to the ranks that own their choices (`docs/guides/experts.md`). A divisor of
            `mesh.size()` and of each layer's experts. `auto`: the cost model chooses, by the sizes of the model, the
            nodes and the speeds of their links, before any batch tells how many tokens there are: the number that loses
            least at its worst, in steps of 8,192 tokens a GPU or any more, against what is best for these. Ranks of
            several nodes share only what does not fit otherwise. It is 1 for models without such layers, and
            wherever experts can't be shared; the logger `cp_rewrite.experts` says why.
    Returns:
        The model itself, changed in place; with `ddp` the wrapper.
    Raises:
        TypeError, ValueError: arguments that do not fit; the message names them. RuntimeError: ranks of the mesh have
            other weights or buffers.
    """
    _check(model, mesh, sharding, data_parallel, offload)
    check_size(experts, mesh.size(), offload)
    if experts == "auto" and (data_parallel == "ddp" or replicate or "weights" in offload):
        experts = 1
    copies = _copies(mesh, replicate, experts)
    ahead = 0 if prefetch is None else whole_number("prefetch", prefetch)
    turns.on_weights(sharding, {**dict(model.named_parameters()), **dict(model.named_buffers())}, _flat(mesh))
    drop_checkpoint_hooks(model)
    if data_parallel == "ddp":
        if any(
            (blocks, mp_policy is not None, reshard_after_forward is not True, ahead, copies > 1, offload, experts != 1)
        ):
            raise ValueError(
                "blocks, mp_policy, reshard_after_forward, prefetch, replicate, offload and experts are FSDP's: leave "
                "them out, or data_parallel='fsdp'"
            )
        wrapped = _with_ddp(model, mesh, sharding)
    else:
        _check_no_optimizer(model.parameters())
        chosen, policy = find_blocks(model) if blocks is None else list(blocks), mp_policy or MixedPrecisionPolicy()
        resharded = _resharded(reshard_after_forward, chosen)
        check_shared_weights(model, chosen)
        shared = begin_sharing(model, _flat(mesh), sharding, experts, policy, again=bool(resharded))
        twin = Twin(model, device_of(sharding), policy.param_dtype, hooks=True)
        # FSDP averages over all ranks; the ranks of a group have parts of one sum.
        divide_by = mesh.size() / sharding.world_size
        if shared is not None:
            shared.cut(twin.owners.values(), device_of(sharding), divide_by)
        on_host = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if "weights" in offload else None
        over = copied_over_first(_flat(mesh), copies) if copies > 1 else _flat(mesh)
        wrapped = shard_weights(model, chosen, over, policy, resharded, divide_by, on_host, shared)
        watch_steps(model, sharding)
        watch_encoders(model, _flat(mesh), sharding)
        watch_optimizers()
        # Hooks of the model itself run around its forward: not in the twin's too.
        store = HostStore() if "checkpoints" in offload else None
        run = compile_segments(twin.module.forward, twin, chosen, sharding, store, prefetch=ahead)
        _replace_forward(model, run, sharding)
        refuse_whole_weights(model)
    refuse_copies(model)
    note_summed(wrapped.parameters())
    # accelerate's `prepare` then leaves it as it is. It would wrap shards in DDP, which fails, and a wrapper once more.
    wrapped._is_accelerate_prepared = True  # type: ignore[assignment]
    return wrapped


def begin_sharing(
    model: nn.Module, mesh: DeviceMesh, sharding: Sharding, experts: ExpertRanks, policy: MixedPrecisionPolicy,
    again: bool,
) -> SharedExperts | None:  # fmt: skip
    """The layers whose experts so many ranks of `mesh`, of one dim, share from now on; None where they share none.
    policy, again: as of `choose`.

    Raises:
        ValueError: they can't. RuntimeError: ranks want other numbers.
    """
    if experts == 1:
        return None
    size = choose(model, mesh, sharding, policy, again) if experts == "auto" else experts
    turns.on_experts(sharding, size, mesh)
    if size == 1:
        return None
    shared = SharedExperts(model, mesh, size)
    shared.begin()
    return shared


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients in place so that their norm, of all parameters together, is `max_norm` at most.

    torch's function of this name takes weights of one mesh; with `experts=` they are on two. A collective of all ranks.

    Args:
        parameters: with their gradients: of a model that `parallelize` gave, or plain ones. norm_type: p of the norm.
        error_if_nonfinite: raise where the norm is none.
    Returns:
        The norm before, a tensor of no dims, the same on all ranks.
    Raises:
        RuntimeError: `error_if_nonfinite`, and the norm is infinite or no number.
    """
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    given: list[Tensor] = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    for p in given:
        if p.grad is not None:
            by_mesh.setdefault(p.grad.device_mesh if isinstance(p.grad, DTensor) else None, []).append(p)
    norms: list[Tensor] = []
    for owned in by_mesh.values():
        norm = nn.utils.get_total_norm([p.grad for p in owned if p.grad is not None], norm_type)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.tensor(0.0)
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the gradients' norm of order {norm_type} is {total.item()}: it can't be clipped")
    for owned in by_mesh.values():
        nn.utils.clip_grads_with_norm_(owned, max_norm, total)
    return total


def check_shared_weights(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise a ValueError where a weight is of two blocks, or of one and of the model around it: FSDP gathers each in
    one place."""
    owners: dict[nn.Parameter, tuple[nn.Module, str]] = {}

    def visit(module: nn.Module, owner: nn.Module, path: str) -> None:
        owner = module if module in blocks else owner
        for name, parameter in module.named_parameters(path, recurse=False, remove_duplicate=False):
            known, first = owners.setdefault(parameter, (owner, name))
            if known is not owner:
                raise ValueError(
                    f"{first} and {name} are one weight, of two blocks or of one and of the model around it: name "
                    "other blocks, or blocks=() for none"
                )
        for name, child in module._modules.items():
            if child is not None:
                visit(child, owner, f"{path}.{name}" if path else name)

    visit(model, model, "")


def _with_ddp(model: nn.Module, mesh: DeviceMesh, sharding: Sharding) -> nn.Module:
    torch._dynamo.config.optimize_ddp = False  # DDP's bucket borders would cut the graph, and with it the proof
    model.to(device_of(sharding))
    compiled = torch.compile(model.forward, backend=backend(sharding), fullgraph=True)
    unchanged = Unchanged(model, hooks=False)

    def run(*args: Any, **kwargs: Any) -> Any:
        unchanged.check()
        return compiled(*args, **kwargs)

    # DDP averages what is accumulated so far over all ranks: it must average, so gradients go in times the ranks that
    # have parts of one sum.
    _replace_forward(model, run, sharding, factor=sharding.world_size)
    # A batch without images leaves their encoder without gradients.
    unused = any(map(has_encoders, model.modules()))
    return DistributedDataParallel(model, process_group=_flat(mesh).get_group(), find_unused_parameters=unused)


def _flat(mesh: DeviceMesh) -> DeviceMesh:
    """All ranks in one dim: weights are equal on context-parallel ranks too."""
    return mesh if mesh.ndim == 1 else mesh._flatten("_".join(mesh.mesh_dim_names or ()))


def _copies(mesh: DeviceMesh, replicate: Any, experts: ExpertRanks) -> int:
    """How many copies of all weights there are on a mesh; 1: its ranks share one."""
    names, dims = (replicate,) if isinstance(replicate, str) else tuple(replicate), mesh.mesh_dim_names or ()
    if names and ({*names} != {*dims[: len(names)]} or len(names) == len(dims)):
        raise ValueError(
            f"replicate must name the first dims of mesh, {dims}, and leave one over which weights are sharded; got "
            f"{replicate!r}"
        )
    if names and experts != 1:
        raise ValueError(f"experts={experts} that ranks share are on a mesh of their own: leave replicate out")
    return math.prod(mesh.mesh.shape[: len(names)])


def _resharded(given: Any, blocks: Sequence[nn.Module]) -> Collection[nn.Module]:
    """The blocks whose weights are dropped after their forward."""
    if isinstance(given, bool):
        return blocks if given else ()
    found: list[Any] = [*given] if isinstance(given, Iterable) else [given]
    if others := [module for module in found if module not in blocks]:
        what = type(others[0]).__name__ if isinstance(others[0], nn.Module) else repr(given)
        raise ValueError(
            "reshard_after_forward must be True, False, or some of the blocks whose weights are gathered together; "
            f"got {what}"
        )
    return found


def _replace_forward(model: nn.Module, run: Callable[..., Any], sharding: Sharding, factor: int = 1) -> None:
    """Let `run` stand in the place of a model's forward inside of batches' blocks, with its outputs made global and
    their gradients multiplied by `factor`."""
    plain = model.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        check_not_traced()
        if not in_batch() and not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return map_tensors(lambda x: begun_from(scaled(whole(x, sharding), factor), x), run(*args, **kwargs))

    model.forward = forward


def _check(model: Any, mesh: Any, sharding: Any, data_parallel: Any, offload: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    if any(isinstance(module, FSDPModule | DistributedDataParallel) for module in model.modules()):
        raise ValueError("the model is sharded or copied already: call parallelize on the plain model, once")
    if part := next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None):
        raise ValueError(
            f"{part} is a DTensor, a part of a weight or a copy on a mesh of its own, as of tensor parallelism: "
            "parallelize shards whole weights over all ranks of mesh. Give it the plain model"
        )
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {mesh!r}")
    if isinstance(offload, str) or not set(offload) <= set(get_args(Offload)):
        raise ValueError(f"offload must be some of {get_args(Offload)}, as ('checkpoints',); got {offload!r}")
    _ = require_sharding(sharding).group  # raises where the mesh is a world size, for dry runs only
    if data_parallel not in get_args(DataParallel):
        raise ValueError(f"data_parallel must be one of {', '.join(get_args(DataParallel))}; got {data_parallel!r}")
    ours, all_ranks = set(sharding.mesh.mesh.flatten().tolist()), set(mesh.mesh.flatten().tolist())
    if not ours <= all_ranks:
        raise ValueError(
            f"mesh holds ranks {sorted(all_ranks)}, the sharding's {sorted(ours)}: pass the mesh of all processes that "
            "train this model, its context-parallel dims among them"
        )
    whole = root_mesh(mesh)
    if whole.size() > mesh.size():
        raise ValueError(
            f"mesh is the slice {mesh.mesh_dim_names} of a mesh {whole.mesh_dim_names} of {whole.size()} processes, "
            "whose others would train models of their own: pass the whole mesh, parallelize(model, mesh, sharding); "
            "for models of their own make a mesh of each model's ranks alone"
        )


def _check_no_optimizer(parameters: Iterable[nn.Parameter]) -> None:
    """Raise a ValueError where an optimizer holds one of these parameters, which are about to be replaced."""
    replaced = set(map(id, parameters))
    for value in gc.get_objects():
        groups = getattr(value, "param_groups", ()) if issubclass(type(value), Optimizer) else ()
        if any(id(p) in replaced for group in groups for p in group["params"]):
            raise ValueError(
                f"an optimizer ({type(value).__name__}) was made of this model's weights, which parallelize replaces "
                "by shards: its steps would change nothing. Make it afterwards, of parallelize's model, or delete it"
            )
