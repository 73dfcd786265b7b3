"""accelerate, told that the ranks of a context-parallel group work on the same rows; and FSDP2 as a trainer's arguments
ask for it, by sharding that keeps one proven graph.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import accelerate.accelerator
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.utils.data import DataLoader

import cp_rewrite as cp
from cp_rewrite.agree import turns
from cp_rewrite.experts.choose import ExpertRanks
from cp_rewrite.experts.layers import SharedExperts, check_size
from cp_rewrite.sharding import Sharding, device_of

from .forward import GlobalForward
from .parallelize import begin_sharing, clip_grad_norm_, watch_encoders, watch_optimizers, watch_steps
from .sharded_forward import shard_weights
from .twin import Twin


class ReplicaAccelerator(Accelerator):
    """Deals out rows to groups of ranks, and counts and gathers one rank of each.

        rank                 0 1 2 3        mesh (dp, cp) = (2, 2)
        process_index        0 0 1 1        which rows a rank gets
        num_processes        2              what losses and counts are scaled by
        gather(x)            x0 x2

    Who is the main process, and what a process saves, goes by the rank as ever; inside of `by_rank` all does.
    """

    leaders: tuple[int, ...]
    """The first rank of each group."""
    replica: int
    """This rank's group."""
    prepared: Callable[[nn.Module], None]
    """Called with each model before it is wrapped."""
    sharded: Callable[[Accelerator, nn.Module], nn.Module]
    """Shards a model's weights, with FSDP2."""
    _ranks_count = False

    @property
    def num_processes(self) -> int:
        return self.state.num_processes if self._ranks_count else len(self.leaders)

    @property
    def process_index(self) -> int:
        return self.state.process_index if self._ranks_count else self.replica

    @contextmanager
    def by_rank(self) -> Generator[None]:
        """FSDP saves and loads what all ranks hold together."""
        self._ranks_count = True
        try:
            yield
        finally:
            self._ranks_count = False

    @property
    def is_last_process(self) -> bool:
        return self.state.process_index == self.state.num_processes - 1

    def gather(self, tensor: Any) -> Any:
        if len(self.leaders) == 1:
            return tensor
        world = dist.get_world_size()

        def of_leaders(x: Tensor) -> Tensor:
            return x.unflatten(0, (world, -1))[list(self.leaders)].flatten(0, 1)

        return recursively_apply(of_leaders, super().gather(tensor))

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        if not self.is_fsdp2:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        for value in args:
            if isinstance(value, nn.Module):
                self.prepared(value)
        with patch.object(accelerate.accelerator, "fsdp2_prepare_model", self.sharded):
            return super().prepare(*args, **kwargs)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        self.prepared(model)
        return super().prepare_model(model, *args, **kwargs)

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> DataLoader[Any]:
        # The Trainer seeds its workers by rank: collators that draw (masked language models) would draw differently.
        seeded: Any = data_loader.worker_init_fn
        if isinstance(seeded, partial) and "rank" in seeded.keywords:
            keywords = {**seeded.keywords, "rank": self.replica}
            data_loader.worker_init_fn = partial(seeded.func, *seeded.args, **keywords)
        return super().prepare_data_loader(data_loader, *args, **kwargs)


def present_replicas(
    accelerator: Accelerator,
    sharding: cp.Sharding,
    prepared: Callable[[nn.Module], None],
    sharded: Callable[[Accelerator, nn.Module], nn.Module],
) -> ReplicaAccelerator:
    """Make an Accelerator a ReplicaAccelerator, in place: trainers keep references to its methods.

    Raises:
        ValueError: the processes do not fall into groups of the annotation's size.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    leaders: list[Any] = [0]
    mine = 0 if isinstance(sharding.mesh, int) else int(sharding.mesh.mesh.min())
    if world > 1:
        leaders = [None] * world
        dist.all_gather_object(leaders, mine)
    groups = sorted(set(leaders))
    if any(leaders.count(group) != sharding.world_size for group in groups):
        raise ValueError(
            f"{world} processes were started, and the sharding's mesh has {sharding.world_size}: every process must be "
            "in a group, as with init_device_mesh(device, (groups, ranks), mesh_dim_names=('dp', 'cp'))['cp']"
        )
    accelerator.__class__ = ReplicaAccelerator
    assert isinstance(accelerator, ReplicaAccelerator)
    accelerator.leaders, accelerator.replica = tuple(groups), groups.index(mine)
    accelerator.prepared, accelerator.sharded = prepared, sharded
    return accelerator


def refused_settings(plugin: Any) -> Mapping[str, tuple[Any, str]]:
    """Settings of accelerate's FSDP that can't be had: name -> (whether it is asked for, what to do)."""
    return {
        "FSDP of version 1": (plugin.fsdp_version != 2, "set fsdp_config={'version': 2}"),
        "cpu_offload of FSDP": (
            isinstance(plugin.cpu_offload, CPUOffloadPolicy),
            "leave weights on the GPU, sharded over more ranks",
        ),
        "activation_checkpointing of FSDP": (
            plugin.activation_checkpointing,
            "the training argument gradient_checkpointing=True does",
        ),
        "cpu_ram_efficient_loading": (plugin.cpu_ram_efficient_loading, "every rank must have loaded the weights"),
        "ignored_modules of FSDP": (plugin.ignored_modules, "weights that are not sharded are not summed over ranks"),
    }


def check_experts(accelerator: Accelerator, experts: Any) -> None:
    """Raise a TypeError or a ValueError where `experts` of all ranks can't share a set, whatever the model; "auto" goes
    with all."""
    check_size(experts, dist.get_world_size() if dist.is_initialized() else 1)
    if experts not in (1, "auto") and not accelerator.is_fsdp2:
        raise ValueError(f"experts={experts} goes with FSDP alone: fsdp=True, fsdp_config={{'version': 2}}")


def make_twin(
    model: nn.Module, sharding: Sharding, accelerator: Accelerator, experts: ExpertRanks
) -> tuple[Twin | None, SharedExperts | None]:
    """The twin that is traced in the place of a model that the accelerator will shard, None if it will not; and the
    layers of experts, where ranks will share them.

    Raises:
        ValueError: ranks can't share this model's experts.
    """
    if not accelerator.is_fsdp2:
        return None, None
    policy, again = _policy(accelerator), bool(accelerator.state.fsdp_plugin.reshard_after_forward)
    shared = begin_sharing(model, _all_ranks(sharding), sharding, experts, policy, again)
    return Twin(model, device_of(sharding), policy.param_dtype), shared


def _all_ranks(sharding: Sharding) -> DeviceMesh:
    ranks = (torch.distributed.get_world_size(),)
    return init_device_mesh(device_of(sharding).type, ranks, mesh_dim_names=("fsdp",))


def shard_model(forward: GlobalForward, accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """In place of accelerate's `fsdp2_prepare_model`: the model, sharded over all ranks by the blocks that the plugin
    names. `model` may have an adapter's wrapper around the one that `forward` is of."""
    if isinstance(model, FSDPModule):
        return model
    if accelerator.mixed_precision != "no":  # as accelerate does: master weights
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.float32)
    plugin, shared = accelerator.state.fsdp_plugin, forward.shared
    is_block = fsdp2_prepare_auto_wrap_policy(plugin, forward.model)
    forward.blocks = () if is_block is None else tuple(m for m in forward.model.modules() if is_block(m))
    mesh = _all_ranks(forward.sharding) if shared is None else shared.mesh
    turns.on_weights(forward.sharding, dict(model.named_parameters()), mesh)
    name = model._get_name()
    if shared is not None and forward.twin is not None:
        shared.cut(forward.twin.owners.values(), device_of(forward.sharding), mesh.size())
    resharded = forward.blocks if plugin.reshard_after_forward else ()
    shard_weights(model, forward.blocks, mesh, _policy(accelerator), resharded, mesh.size(), shared=shared)
    watch_steps(model, forward.sharding)
    watch_optimizers()
    watch_encoders(model, mesh, forward.sharding)
    # FSDP makes a class of another name of it. By its name Trainer tells whether smoothed labels are to be shifted.
    model._get_name = lambda: name
    return model


def _policy(accelerator: Accelerator) -> MixedPrecisionPolicy:
    """accelerate's dtypes, but outputs as the model made them: a loss is not rounded."""
    given = accelerator.state.fsdp_plugin.mixed_precision_policy
    return MixedPrecisionPolicy() if given is None else MixedPrecisionPolicy(given.param_dtype, given.reduce_dtype)
