"""FSDP2 as a trainer's arguments ask for it: accelerate's settings, and sharding that keeps one proven graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

from cp_rewrite.batch import agree
from cp_rewrite.integrations.fsdp.sharded_forward import shard_weights
from cp_rewrite.integrations.fsdp.steps import watch_steps
from cp_rewrite.integrations.fsdp.twin import Twin
from cp_rewrite.sharding import Sharding, device_of

from .forward import GlobalForward


def refused_settings(plugin: Any) -> Mapping[str, tuple[Any, str]]:
    """What of accelerate's FSDP can't be had: name -> (whether it is asked for, what to do)."""
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


def make_twin(model: nn.Module, sharding: Sharding, accelerator: Accelerator) -> Twin | None:
    """What is traced in the place of a model that the accelerator will shard; None: it will not."""
    if not accelerator.is_fsdp2:
        return None
    return Twin(model, device_of(sharding), _policy(accelerator).param_dtype)


def shard_model(forward: GlobalForward, accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """In place of accelerate's `fsdp2_prepare_model`: the model, sharded over all ranks by the blocks that the plugin
    names. `model` may have an adapter's wrapper around the one that `forward` is of."""
    if isinstance(model, FSDPModule):
        return model
    if accelerator.mixed_precision != "no":  # as accelerate does: master weights
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.float32)
    agree.on_weights(forward.sharding, dict(model.named_parameters()))
    plugin, world = accelerator.state.fsdp_plugin, torch.distributed.get_world_size()
    is_block = fsdp2_prepare_auto_wrap_policy(plugin, forward.model)
    forward.blocks = () if is_block is None else tuple(m for m in forward.model.modules() if is_block(m))
    mesh = init_device_mesh(device_of(forward.sharding).type, (world,), mesh_dim_names=("fsdp",))
    name = model._get_name()
    shard_weights(model, forward.blocks, mesh, _policy(accelerator), bool(plugin.reshard_after_forward), world)
    watch_steps(model, forward.sharding)
    # FSDP makes a class of another name of it. By its name Trainer tells whether smoothed labels are to be shifted.
    model._get_name = lambda: name
    return model


def _policy(accelerator: Accelerator) -> MixedPrecisionPolicy:
    """accelerate's dtypes, but outputs as the model made them: a loss is not rounded."""
    given = accelerator.state.fsdp_plugin.mixed_precision_policy
    return MixedPrecisionPolicy() if given is None else MixedPrecisionPolicy(given.param_dtype, given.reduce_dtype)
