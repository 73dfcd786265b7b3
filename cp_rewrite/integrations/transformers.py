"""The Trainer of `transformers`, context-parallel.

    trainer = ContextParallelTrainer(model, args, train_dataset=rows, sharding=sharding)

in `torchrun`, with a sharding over all processes or over one dim of a mesh of them. Losses, gradients, their norm,
metrics and checkpoints are those of a Trainer that has the group's rows on one process.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers.trainer import Trainer

import cp_rewrite as cp
from cp_rewrite.batch.notes import WITHOUT_LIGER
from cp_rewrite.experts.choose import ExpertRanks
from cp_rewrite.integrations.accelerator import (
    ReplicaAccelerator,
    check_experts,
    make_twin,
    present_replicas,
    refused_settings,
    shard_model,
)
from cp_rewrite.integrations.forward import Switch, forward_class_of, forward_of
from cp_rewrite.integrations.parallelize import drop_checkpoint_hooks
from cp_rewrite.integrations.twin import refuse_copies
from cp_rewrite.sharding import require_sharding

# Mixed into trainers of other libraries too, before their class, whatever Trainer they descend from.
_Base = Trainer if TYPE_CHECKING else object


class ContextParallelMixin(_Base):
    """Makes a subclass of `transformers.Trainer` context-parallel: `class MyTrainer(ContextParallelMixin, Trainer)`.

    Every rank of the sharding's group gets the same rows, in batches as if it were alone (`per_device_train_batch_size`
    counts rows of a group); where the processes form several groups, each gets other rows. Inside of the trainer's
    steps the model takes whole rows and returns the loss and the values per token of whole rows, on every rank of the
    group. Logits are put together only where they are read: with metrics, in `compute_loss` with
    `return_outputs=True`, under label smoothing or with a loss function of your own.

    Args:
        sharding: the annotation. Its `tokens` name what the model is called with, `labels` among them.
        experts: how many consecutive ranks of all share one set of experts, under FSDP (`docs/guides/experts.md`);
            `auto` as of `parallelize`.
    Raises:
        TypeError: no Sharding. ValueError: a training argument that would be silently wrong; the message says which.
    """

    def __init__(self, *args: Any, sharding: cp.Sharding, experts: ExpertRanks = 1, **kwargs: Any) -> None:
        self.sharding, self._switch = require_sharding(sharding), Switch()
        self._experts: ExpertRanks = experts
        torch._dynamo.config.optimize_ddp = False  # DDP's bucket borders would cut the graph, and with it the proof
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        # One process would read for all and deal out slices: each group reads for itself.
        self.args.accelerator_config.dispatch_batches = False
        super().create_accelerator_and_postprocess()
        _check_arguments(self)
        check_experts(self.accelerator, self._experts)
        present_replicas(self.accelerator, self.sharding, self._parallelize, self._shard)

    def _parallelize(self, model: nn.Module) -> None:
        """Replace a model's forward, once; of a PEFT model that of the model inside."""
        inner = _inner(model)
        before = forward_of(inner)
        if before is None:
            drop_checkpoint_hooks(inner)
            twin, shared = make_twin(inner, self.sharding, self.accelerator, self._experts)
            forward_class_of(inner)(inner, self.sharding, self._switch, twin, shared).install()
            refuse_copies(inner)
        else:
            before.adopt(self.sharding, self._switch, self._experts)

    def _shard(self, accelerator: Accelerator, model: nn.Module) -> nn.Module:
        forward = forward_of(_inner(model))
        assert forward is not None, "it was parallelized before"
        return shard_model(forward, accelerator, model)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._by_rank():
            super()._save_checkpoint(*args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._by_rank():
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> None:
        with self._by_rank():
            super()._load_optimizer_and_scheduler(*args, **kwargs)

    def _load_best_model(self, *args: Any, **kwargs: Any) -> None:
        with self._by_rank():
            super()._load_best_model(*args, **kwargs)

    def _by_rank(self) -> AbstractContextManager[None]:
        assert isinstance(self.accelerator, ReplicaAccelerator)
        return self.accelerator.by_rank()

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._switch.set(on=True):
            return super().training_step(*args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        with self._switch.set(on=True, loss_only=prediction_loss_only):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        with self._switch.set(loss_only=self._switch.loss_only or not return_outputs):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) // self.sharding.world_size

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return super().floating_point_ops(inputs) // self.sharding.world_size


class ContextParallelTrainer(ContextParallelMixin, Trainer):
    """`transformers.Trainer` with one more argument, `sharding`. See ContextParallelMixin."""


def _inner(model: nn.Module) -> nn.Module:
    """The model inside of a PEFT model, whose forward takes the batch."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def _check_arguments(trainer: ContextParallelMixin) -> None:
    """Raise for settings, of arguments or of `accelerate launch`, that deal out rows, compile or split otherwise."""
    args, parallelism = trainer.args, getattr(trainer.accelerator, "parallelism_config", None)
    wrong: dict[str, tuple[Any, str]] = {
        "rows='own'": (
            trainer.sharding.rows == "own",
            "the ranks of a group get the same rows; a loop of your own can share out rows of all groups",
        ),
        "torch_compile=True": (args.torch_compile, "the model is compiled by the sharding's own backend"),
        "use_liger_kernel=True": (
            getattr(args, "use_liger_kernel", False),
            f"its kernels can't be traced into one graph; {WITHOUT_LIGER}",
        ),
        "parallelism_config": (
            parallelism is not None and parallelism.non_data_parallel_size > 1,
            "the sharding's mesh says who gets which rows",
        ),
        "DeepSpeed": (trainer.is_deepspeed_enabled, "use fsdp=True, or neither"),
        **(refused_settings(trainer.accelerator.state.fsdp_plugin) if trainer.is_fsdp_enabled else {}),
        "fsdp=True on CPUs": (
            args.fsdp and not trainer.is_fsdp_enabled and args.world_size > 1,
            "accelerate would copy weights instead; leave out fsdp=True, or use_cpu=True",
        ),
        "a trainer that generates (GRPO, RLOO)": (
            hasattr(args, "num_generations"),
            "ranks of a group would sample other completions; SFT, DPO and KTO do not generate",
        ),
        "a trainer of rewards": (
            hasattr(args, "center_rewards_coefficient"),
            "its loss compares scores of whole rows, read off their last tokens; SFT, DPO and KTO compare tokens",
        ),
        "train_sampling_strategy='batch_rebalance'": (
            getattr(args, "train_sampling_strategy", "") == "batch_rebalance",
            "it gives every process other rows",
        ),
        "eval_use_gather_object=True": (args.eval_use_gather_object, "it gathers every process's copy of the metrics"),
    }
    for name, (given, why) in wrong.items():
        if given:
            raise ValueError(f"{name} does not go with context parallelism: {why}")
