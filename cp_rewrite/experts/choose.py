"""`experts="auto"`: how many ranks share a set, by the cost model, from what all ranks know alike before the first
batch."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from cp_rewrite.planning.cost.constants import BESIDE_TENSORS, CHOICES, TRIPS, TRIPS_AGAIN
from cp_rewrite.planning.cost.experts import Machine, Mixture, choose_ranks, faster_up_to
from cp_rewrite.sharding import Sharding, device_of, speeds_of

from .families import family_of, weights_of, widths_of
from .layers import is_layer_of_experts, layers_to_share

log = logging.getLogger(__name__)
ExpertRanks = int | Literal["auto"]
"""How many ranks share a set, as users say it."""


def choose(model: nn.Module, mesh: DeviceMesh, sharding: Sharding, policy: MixedPrecisionPolicy, again: bool) -> int:
    """How many ranks of `mesh`, of one dim, are to share a set of this model's experts, as `choose_ranks` has it of
    any number of tokens; 1 where they can share none. Logged, with the reason.

    policy: FSDP's. again: weights are gathered for the backward once more.
    """
    ranks, sizes, why = mesh.size(), list[int](), "there is one rank"
    for n in (n for n in range(2, ranks + 1) if ranks % n == 0):
        try:
            layers_to_share(model, ranks, n)
            sizes.append(n)
        except ValueError as error:
            why = str(error)
    if not sizes:
        return _told(mesh, 1, why)
    layers = [layer for layer in model.modules() if is_layer_of_experts(layer)]
    device = sharding.device_speeds or speeds_of(device_of(sharding))
    machine, mixture = Machine(ranks, _node(mesh, sharding), device), mixture_of(model, layers, policy, again)
    shared = _distinct(layers)
    held = sum(p.nbytes * (4 if p.requires_grad else 1) for p in model.parameters()) / ranks
    item = (policy.param_dtype or shared[0].dtype).itemsize
    each = [sum(p.numel() for p in weights_of(layer)) for layer in layers]
    # The gathered weights of two layers, or of all; gradients of one, and of the one behind it in fp32.
    most = item * (2 * max(each) if again else sum(each)) + (item + 4) * max(each)
    room = device.device_bytes - BESIDE_TENSORS
    chosen = choose_ranks(mixture, machine, sizes, fits=lambda n: held + most / n <= room)
    why = f"of {ranks} on nodes of {machine.node}, by the speeds of {device.name}"
    if chosen > 1:
        why += f": faster than FSDP alone up to {faster_up_to(mixture, machine, chosen):,} tokens a GPU"
    return _told(mesh, chosen, why)


def mixture_of(model: nn.Module, layers: Sequence[Any], policy: MixedPrecisionPolicy, again: bool) -> Mixture:
    """The sizes of a model's layers of experts. Arguments as of `choose`."""
    shared, checkpointed = _distinct(layers), any(getattr(m, "gradient_checkpointing", False) for m in model.modules())

    def nbytes(p: nn.Parameter, dtype: torch.dtype | None) -> int:
        return p.numel() * (dtype or p.dtype).itemsize

    each = {id(p): p.numel() for m in model.modules() if not isinstance(m, nn.Embedding) for p in m.parameters(False)}
    inside = sum(p.numel() for p in shared)
    chosen = chosen_of(layers[0])
    products = sum(each.values()) - inside + inside * min(1.0, chosen / widths_of(layers[0]).experts)
    return Mixture(
        layers=len(layers),
        chosen=chosen,
        trips=TRIPS + TRIPS_AGAIN * checkpointed,
        gathered=sum(nbytes(p, policy.param_dtype) for p in shared) * (1 + again),
        summed=sum(nbytes(p, policy.reduce_dtype or policy.param_dtype) for p in shared if p.requires_grad),
        row=sum(widths_of(layer).columns for layer in layers) * (policy.param_dtype or shared[0].dtype).itemsize,
        flops=6 * products,
    )


def chosen_of(layer: Any) -> int:
    """Experts that a token has in a layer, as its config tells, or what is usual."""
    family = family_of(layer)
    found = family.chosen(layer) if family else getattr(getattr(layer, "config", None), "num_experts_per_tok", None)
    return found if isinstance(found, int) else CHOICES


def _distinct(layers: Sequence[Any]) -> list[nn.Parameter]:
    """Weights of layers, tied ones once."""
    return [*{id(p): p for layer in layers for p in weights_of(layer)}.values()]


def _node(mesh: DeviceMesh, sharding: Sharding) -> int:
    """Consecutive ranks of `mesh` that share a machine, as the annotation or torchrun tells; all, where none does."""
    named = sharding.ranks_per_node
    if named is None or named == sharding.world_size:  # of a group: there may be several on a machine
        named = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or mesh.size()
    machines = mesh.mesh.flatten() // named
    return math.gcd(*machines.unique_consecutive(return_counts=True)[1].tolist())


def _told(mesh: DeviceMesh, chosen: int, why: str) -> int:
    if mesh.get_local_rank() == 0:
        log.info("experts='auto' is experts=%d: %s", chosen, why)
    return chosen
