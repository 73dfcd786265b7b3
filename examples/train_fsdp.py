"""Train a Llama on packed text with FSDP2 and context parallelism: accumulation, clipping, checkpoints, resume.

    torchrun --nproc-per-node 2 examples/train_fsdp.py                    # two processes on a CPU, a tiny model
    torchrun --nproc-per-node 8 examples/train_fsdp.py --cp 4 --width 2048 --layers 16 --tokens 131072

The text is this repository's own, its bytes are the tokens. Run it again with the same --out and it goes on where its
last checkpoint is.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import cp_rewrite as cp

ROOT = Path(__file__).resolve().parent.parent
END = 256
"""The token behind each document; those below are bytes."""
TOKENS = {"input_ids": 1, "position_ids": 1, "labels": 1}


def main() -> None:
    args = parse_args()
    mesh = start(args.cp)
    sharding = cp.Sharding(mesh["cp"], TOKENS, cp.PositionIds("position_ids"), inner=args.inner)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mesh.device_type == "cuda" else None
    model = cp.parallelize(make_model(args), mesh, sharding, mp_policy=half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    state = {"step": 0}
    resume(model, optimizer, state, args.out)
    groups, group = mesh["dp"].size(), mesh["dp"].get_local_rank()
    rows = packed_rows(documents(), args.tokens, skip=state["step"] * args.accumulation * groups)
    loss = float("nan")
    bar = tqdm(total=args.steps, initial=state["step"], disable=dist.get_rank() > 0)
    while state["step"] < args.steps:
        start_time = time.perf_counter()
        # Every group of context-parallel ranks takes other rows; the ranks of a group take the same.
        batches = [[next(rows) for _ in range(groups)][group] for _ in range(args.accumulation)]
        loss, norm, imbalance = train_step(model, optimizer, sharding, mesh, batches)
        state["step"] += 1
        rate = args.tokens * args.accumulation * groups / (time.perf_counter() - start_time)
        bar.set_postfix_str(f"loss {loss:.4f}, norm {norm:.2f}, {rate:,.0f} tokens/s, imbalance {imbalance:.3f}")
        bar.update()
        if state["step"] % args.save_every == 0 or state["step"] == args.steps:
            save(model, optimizer, state, args.out)
    bar.close()
    if dist.get_rank() == 0:
        print(f"step {state['step']}: loss {loss:.6f}")
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, help="ranks that share a row; all, unless given")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--accumulation", type=int, default=2, help="rows of each group for one optimizer step")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per packed row")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--inner", help="inductor | aot_eager | eager", default="inductor" if on_gpus() else "aot_eager"
    )
    parser.add_argument("--save-every", type=int, default=6, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, default=Path("out/train_fsdp"), help="folder of the checkpoints")
    return parser.parse_args()


def on_gpus() -> bool:
    return torch.cuda.is_available()


def start(cp_ranks: int | None) -> DeviceMesh:
    """Join the processes that torchrun started: a mesh of groups that train on other rows (dp), and the ranks of each
    (cp)."""
    if on_gpus():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpus() else "gloo")
    world = dist.get_world_size()
    ranks = cp_ranks or world
    return init_device_mesh("cuda" if on_gpus() else "cpu", (world // ranks, ranks), mesh_dim_names=("dp", "cp"))


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    heads = max(4, args.width // 128)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(2, heads // 4),
        max_position_embeddings=args.tokens,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def documents() -> Iterator[Tensor]:
    """The repository's files, again and again, as tokens."""
    files = sorted(file for pattern in ("cp_rewrite/**/*.py", "docs/**/*.md", "*.md") for file in ROOT.glob(pattern))
    for file in itertools.cycle(files):
        yield torch.tensor([*file.read_bytes(), END])


def packed_rows(texts: Iterator[Tensor], size: int, skip: int) -> Iterator[dict[str, Tensor]]:
    """Rows of `size` tokens. A document that does not fit goes on in the next row, as one of its own."""
    rest = next(texts)
    while True:
        parts: list[Tensor] = []
        missing = size
        while missing:
            rest = rest if len(rest) else next(texts)
            parts.append(rest[:missing])
            missing, rest = missing - len(parts[-1]), rest[missing:]
        if skip:
            skip -= 1
            continue
        ids = torch.cat(parts)[None]
        positions = torch.cat([torch.arange(len(part)) for part in parts])[None]
        # The first token of a document has no other before it that it could be foretold from.
        yield {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def train_step(
    model: Any, optimizer: Any, sharding: cp.Sharding, mesh: DeviceMesh, batches: list[dict[str, Tensor]]
) -> tuple[float, float, float]:
    """One optimizer step: (the mean loss over all tokens of all groups, norm of its gradient, worst imbalance)."""
    # Every loss is divided by the targets of the whole step. Gradients of groups are averaged, so it is by their mean.
    count = torch.stack([(batch["labels"][:, 1:] != -100).sum() for batch in batches]).sum().to(mesh.device_type)
    dist.all_reduce(count, group=mesh["dp"].get_group())
    count = count / mesh["dp"].size()
    total, imbalance = torch.zeros((), device=mesh.device_type), 1.0
    for batch in batches:
        with sharding.shard({**batch, "num_items_in_batch": count}, shift_labels=True) as local:
            loss = model(**local).loss
            imbalance = max(imbalance, local.plan.imbalance())
        loss.backward()
        total += loss.detach()
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total, group=mesh["dp"].get_group())
    return float(total / mesh["dp"].size()), float(norm.full_tensor()), imbalance


def save(model: Any, optimizer: Any, state: dict[str, int], out: Path) -> None:
    """Each rank writes its part. The name comes last, when all have written."""
    weights, moments = get_state_dict(model, optimizer)
    folder = f"step-{state['step']}"
    dcp.save({"model": weights, "optimizer": moments, "state": state}, checkpoint_id=out / folder)
    if dist.get_rank() == 0:
        (out / "last").write_text(folder)
    dist.barrier()


def resume(model: Any, optimizer: Any, state: dict[str, int], out: Path) -> None:
    """Load the last checkpoint, of whatever number of ranks, if there is one."""
    if not (out / "last").exists():
        return
    weights, moments = get_state_dict(model, optimizer)
    loaded: dict[str, Any] = {"model": weights, "optimizer": moments, "state": state}
    dcp.load(loaded, checkpoint_id=out / (out / "last").read_text())
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    state.update(loaded["state"])


if __name__ == "__main__":
    main()
