"""The peak of a training step beside what `python -m cp_rewrite memory` predicts.

    torchrun --nproc-per-node 1 examples/bench/memory.py --tokens 32768 --vocab 128256 --checkpointed

A Llama with FSDP2, bf16 over fp32 weights, AdamW, gradients accumulated over two rows of one document; three steps.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaConfig, LlamaForCausalLM

import cp_rewrite as cp
from cp_rewrite.diagnose.explain_config import explain_config
from cp_rewrite.diagnose.forecast.fit import fit_of

TOKENS = {"input_ids": 1, "position_ids": 1, "labels": 1}


def main() -> None:
    args = parse_args()
    config = LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.width,
        intermediate_size=args.mlp,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads_kv,
        head_dim=128,
        tie_word_embeddings=args.tied,
        use_cache=False,
        architectures=["LlamaForCausalLM"],
    )
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    world = dist.get_world_size()
    measured = measure(config, args, world)
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            target = explain_config(folder, [args.tokens], world).target
        assert target is not None
        fit = fit_of(target, args.checkpointed)
        print(fit)
        peak = fit.memory.peak / 2**30
        print(f"{args}: measured {measured:.1f} GiB, predicted {peak:.1f} ({100 * (peak / measured - 1):+.1f} %)")
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="of a row")
    parser.add_argument("--vocab", type=int, default=320)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--mlp", type=int, default=7168)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--heads-kv", type=int, default=4)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--checkpointed", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


def measure(config: LlamaConfig, args: argparse.Namespace, world: int) -> float:
    """GiB that torch allocated at most."""
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("cp",))
    sharding = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"))
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    if args.checkpointed:
        model.gradient_checkpointing_enable()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = cp.parallelize(model.train(), mesh, sharding, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, args.vocab, (1, args.tokens), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "position_ids": torch.arange(args.tokens)[None], "labels": ids}
    for step in range(args.steps):
        if step == 1:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            with sharding.shard(batch, shift_labels=True) as local:
                loss = model(**local).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() / 2**30


if __name__ == "__main__":
    main()
