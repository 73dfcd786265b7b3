"""The transformers Trainer, context-parallel: every process gets the same packed row and computes its part of it.

torchrun --nproc-per-node 2 examples/hf_trainer.py
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import cp_rewrite as cp

TOKENS = {"input_ids": 1, "position_ids": 1, "labels": 1}


class PackedRows(Dataset[dict[str, Tensor]]):
    """Rows of three documents, each of which counts upwards."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        positions = torch.cat([torch.arange(n) for n in (20 + i % 7, 50, 58 - i % 7)])
        ids = (positions * 3 + i) % 128
        return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


class ContextParallelTrainer(Trainer):
    """Two methods differ from a plain Trainer: what a process is fed, and how its loss comes about."""

    def __init__(self, *args: Any, sharding: cp.Sharding, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sharding = sharding
        self.compiled: Any = None

    def get_train_dataloader(self) -> DataLoader[Any]:
        # The same rows on every rank of the group: a distributed sampler would deal out different ones.
        generator = torch.Generator().manual_seed(self.args.seed)
        return DataLoader(self.train_dataset, self.args.per_device_train_batch_size, shuffle=True, generator=generator)

    def compute_loss(self, model: Any, inputs: dict[str, Any], **_: Any) -> Tensor:
        if self.compiled is None:
            torch._dynamo.config.optimize_ddp = False  # DDP's bucket borders would cut the graph
            self.compiled = torch.compile(model, backend=cp.backend(self.sharding))
        with self.sharding.shard(inputs, shift_labels=True) as local:
            loss = self.compiled(**local).loss
        # Each rank holds its part of the row's loss; DDP averages gradients over ranks, so the parts are scaled up.
        return loss * self.sharding.world_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--inner", default="aot_eager", help="inductor | aot_eager | eager")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    sharding = cp.Sharding(mesh["cp"], TOKENS, cp.PositionIds("position_ids"), inner=args.inner)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            max_steps=args.steps,
            per_device_train_batch_size=1,
            learning_rate=3e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            remove_unused_columns=False,
        )
        ContextParallelTrainer(
            LlamaForCausalLM(config), settings, train_dataset=PackedRows(), sharding=sharding
        ).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
