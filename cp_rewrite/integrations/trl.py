"""SFT, DPO and KTO of TRL, context-parallel, with packed rows (`packing=True`), padding-free or padded ones.

trainer = ContextParallelSFTTrainer(model, args, train_dataset=texts, processing_class=tokenizer, sharding=sharding)
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import patch

from accelerate import Accelerator
from torch import nn
from trl.trainer import dpo_trainer, kto_trainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.sft_trainer import SFTTrainer

from .transformers import ContextParallelMixin


class ContextParallelSFTTrainer(ContextParallelMixin, SFTTrainer):
    """`trl.SFTTrainer` with one more argument, `sharding`. See ContextParallelMixin."""


class _WithReference(ContextParallelMixin):
    """For trainers that compare a model with a reference. Under FSDP TRL shards that by itself, and it would see whole
    rows on every rank."""

    trainer_module: ClassVar[ModuleType]
    """Where the trainer's class looks up `prepare_fsdp`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with patch.object(self.trainer_module, "prepare_fsdp", self._prepare_reference):
            super().__init__(*args, **kwargs)

    def _prepare_reference(self, model: nn.Module, accelerator: Accelerator) -> nn.Module:
        self._parallelize(model)
        return self._shard(accelerator, model).eval()


class ContextParallelDPOTrainer(_WithReference, DPOTrainer):
    """`trl.DPOTrainer` with one more argument, `sharding`. See ContextParallelMixin."""

    trainer_module = dpo_trainer


class ContextParallelKTOTrainer(_WithReference, KTOTrainer):
    """`trl.KTOTrainer` with one more argument, `sharding`. See ContextParallelMixin."""

    trainer_module = kto_trainer
