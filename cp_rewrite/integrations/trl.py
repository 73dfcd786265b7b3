"""SFT and DPO of TRL, context-parallel, with packed rows (`packing=True`), padding-free or padded ones.

trainer = ContextParallelSFTTrainer(model, args, train_dataset=texts, processing_class=tokenizer, sharding=sharding)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

from accelerate import Accelerator
from torch import Tensor, nn
from trl.trainer import dpo_trainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_trainer import SFTTrainer

import cp_rewrite as cp
from cp_rewrite.batch.marks import mark_part, mark_token_dim
from cp_rewrite.integrations.forward import GlobalForward

from .transformers import ContextParallelMixin


class FusedForward(GlobalForward):
    """Of models whose head TRL replaced: it returns log-probabilities of the labels and no logits.

    The model below the head is compiled, and proven. The head works on each token alone, in kernels of TRL's own, and
    runs as it is, on this rank's tokens.
    """

    def compiled(self, sharding: cp.Sharding, loss_only: bool) -> Callable[..., Any]:
        backbone: Any = self.model.base_model
        of_backbone = backbone.forward if self.twin is None else cast(Any, self.twin.module).base_model.forward

        # A frame of our own: transformers changes the dict of its arguments, which in the outermost frame reads like a
        # value that outlives the call.
        def inner(**kwargs: Any) -> Any:
            return of_backbone(**kwargs)

        run = self.compile(inner, sharding, loss_only)

        def forward(**local: Any) -> Any:
            with patch.object(backbone, "forward", run):
                return self.plain(**local)

        return forward

    def joined(self, outputs: Any, sharding: cp.Sharding) -> Any:
        if "aux_loss" in outputs:
            raise ValueError("the auxiliary loss of experts mixes tokens: set router_aux_loss_coef=0.0")
        for value in outputs.values():
            if isinstance(value, Tensor) and value.ndim > 1:  # of the head, by token
                mark_part(value, False)
                mark_token_dim(value, 1)
        outputs = super().joined(outputs, sharding)
        if "log_probs" in outputs:
            # One value for each label but a row's first. The labels were shifted before the cut, so that the last token
            # has one too, which is ignored.
            # Copies: an op in place on a view would pass by the hooks that FSDP has on outputs.
            values = {name: value[:, :-1].clone() if value.ndim > 1 else value for name, value in outputs.items()}
            return type(outputs)(**values)
        return outputs


class ContextParallelSFTTrainer(ContextParallelMixin, SFTTrainer):
    """`trl.SFTTrainer` with one more argument, `sharding`. See ContextParallelMixin."""

    forward_class = FusedForward


class ContextParallelDPOTrainer(ContextParallelMixin, DPOTrainer):
    """`trl.DPOTrainer` with one more argument, `sharding`. See ContextParallelMixin."""

    forward_class = FusedForward

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with patch.object(dpo_trainer, "prepare_fsdp", self._prepare_reference):
            super().__init__(*args, **kwargs)

    def _prepare_reference(self, model: nn.Module, accelerator: Accelerator) -> nn.Module:
        """Under FSDP TRL shards the reference by itself, which would see whole rows on every rank."""
        self._parallelize(model)
        return self._shard(accelerator, model).eval()
