"""The transformers Trainer, context-parallel: every process gets the same packed rows and computes its part of them.

torchrun --nproc-per-node 2 examples/hf_trainer.py --accumulation 4
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import cp_rewrite as cp
from cp_rewrite.integrations.transformers import ContextParallelTrainer

TOKENS = {"input_ids": 1, "position_ids": 1, "labels": 1}


class PackedRows(Dataset[dict[str, Tensor]]):
    """Rows of three documents, each of which counts upwards."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        positions = torch.cat([torch.arange(n) for n in (20 + i % 7, 50, 58 - i % 7)])
        ids = (positions * 3 + i) % 128
        return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per optimizer step")
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
            gradient_accumulation_steps=args.accumulation,
            learning_rate=3e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
        )
        ContextParallelTrainer(
            LlamaForCausalLM(config), settings, train_dataset=PackedRows(), sharding=sharding
        ).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
