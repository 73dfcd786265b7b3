"""One run of a trainer, on this process alone or as one rank of a context-parallel group, and what came of it."""

from __future__ import annotations

import functools
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

import cp_rewrite as cp

TOKENS = {"input_ids": 1, "position_ids": 1, "labels": 1}


FSDP: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}
"""Training arguments of one that shards weights."""


@dataclass
class Run:
    """`logs`: what was logged, without timings; `weights` after the last step; `gradients` of each step, cut to
    `max_grad_norm`; `metrics` of further evaluations."""

    logs: list[dict[str, float]]
    weights: dict[str, Tensor]
    gradients: list[dict[str, Tensor]]
    metrics: dict[str, float] = field(default_factory=dict[str, float])


def sharding_of(mesh: DeviceMesh, **options: Any) -> cp.Sharding:
    return cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), inner="eager", **options)


@functools.cache
def grid_of(mesh: DeviceMesh) -> DeviceMesh:
    """Two groups of two processes."""
    return DeviceMesh("cpu", mesh.mesh.view(2, 2), mesh_dim_names=("dp", "cp"))


@contextmanager
def launched(mesh: DeviceMesh | None) -> Generator[None]:
    """Sets what `torchrun` sets, for a while. Accelerate keeps what it read once, and sets more: both are undone."""
    values = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TQDM_DISABLE": "1"}
    if mesh is not None:
        rank, size = str(torch.distributed.get_rank()), str(torch.distributed.get_world_size())
        values |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    AcceleratorState._reset_state(True)
    torch._dynamo.reset()
    # A user's limit on how often a model is compiled, not the one of processes that live for all tests.
    with patch.dict(os.environ, values), torch._dynamo.config.patch(recompile_limit=8):
        try:
            yield
        finally:
            AcceleratorState._reset_state(True)
            assert not PartialState._shared_state


def settings_of(folder: str, **options: Any) -> dict[str, Any]:
    """Training arguments of a quiet run on the CPU that logs every step."""
    return {
        "output_dir": folder,
        "max_steps": 2,
        "per_device_train_batch_size": 1,
        "learning_rate": 0.3,  # of gradients whose norm is cut to 1: steps that change weights by their own size
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "optim": "sgd",
        "dataloader_pin_memory": False,
        **options,
    }


def on_cpu(args: Any) -> Any:
    """accelerate calls the CPU of a distributed run `cpu:0`, and torch.load, with which a run is resumed, does not.
    With FSDP it goes on GPUs only."""
    assert args.device.type == "cpu"
    if args.fsdp:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    vars(args)["_setup_devices"] = torch.device("cpu")
    return args


class Gradients(TrainerCallback):
    """Gradients that optimizers are given. Adam and clipping hide a factor that losses and weights do not show."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.grad is not None}
        self.steps.append({name: whole(grad) for name, grad in found.items()})


def whole(value: Tensor) -> Tensor:
    """A copy, of all of a sharded one."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def trained(trainer: Any, resume: str | None = None) -> Run:
    """Train; everything that came of it."""
    trainer.add_callback(seen := Gradients())
    trainer.train(resume_from_checkpoint=resume)
    return result_of(trainer, seen.steps)


def result_of(trainer: Any, gradients: list[dict[str, Tensor]]) -> Run:
    logs = [
        {name: value for name, value in entry.items() if not any(word in name for word in ("runtime", "per_second"))}
        for entry in trainer.state.log_history
    ]
    assert isinstance(trainer.model, FSDPModule) == bool(trainer.args.fsdp)
    return Run(logs, {name: whole(weight) for name, weight in trainer.model.named_parameters()}, gradients)


def compare(expected: Run, found: Run, limit: float = 1e-5) -> None:
    """Relative: numbers that were logged, the norm of each parameter and gradient."""
    assert len(expected.logs) == len(found.logs)
    for one, many in zip(expected.logs, found.logs, strict=True):
        same(one, many, limit)
    same(expected.metrics, found.metrics, limit)
    assert len(expected.gradients) == len(found.gradients) > 0
    pairs = zip([expected.weights, *expected.gradients], [found.weights, *found.gradients], strict=True)
    for step, (one, many) in enumerate(pairs):
        assert one.keys() == many.keys()
        for name, value in one.items():
            # A gradient that is nearly 0 beside the others is made of rounding.
            size = max(float(value.norm()), 1e-3 * max(float(other.norm()) for other in one.values()))
            error = float((many[name] - value).norm()) / size
            assert error <= limit, f"{name}, {f'gradient of step {step}' if step else 'weight'}: {error:.1e}"


def same(expected: Mapping[str, float], found: Mapping[str, float], limit: float) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        # Rewards are differences of sums of log-probabilities, which cancel.
        assert abs(found[name] - value) <= limit * max(abs(value), 1.0), f"{name}: {value} and {found[name]}"
