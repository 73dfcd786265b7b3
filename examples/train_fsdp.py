"""Train a Llama on packed text with FSDP2 and context parallelism: accumulation, clipping, checkpoints, resume.

    torchrun --nproc-per-node 2 examples/train_fsdp.py                    # two processes on a CPU, a tiny model
    torchrun --nproc-per-node 8 examples/train_fsdp.py --rows 2 --width 2048 --layers 16 --tokens 131072

All ranks share all rows: a short document is one rank's, a long one is cut. The text is this repository's own, its
bytes are the tokens. Run it again with the same --out and it goes on where its last checkpoint is.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
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
    mesh = start()
    sharding = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), rows="own", inner=args.inner)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mesh.device_type == "cuda" else None
    model = cp.parallelize(make_model(args), mesh, sharding, mp_policy=half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    state = {"step": 0}
    resume(model, optimizer, state, args.out)
    rows = packed_rows(documents(), args.tokens, skip=state["step"] * args.accumulation * args.rows)
    loss = float("nan")
    bar = tqdm(total=args.steps, initial=state["step"], disable=dist.get_rank() > 0)
    with closing(planned(sharding, rows, args)) as blocks:
        while state["step"] < args.steps:
            start_time = time.perf_counter()
            loss, norm, imbalance = train_step(model, optimizer, itertools.islice(blocks, args.accumulation))
            state["step"] += 1
            rate = args.tokens * args.accumulation * args.rows / (time.perf_counter() - start_time)
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
    parser.add_argument("--rows", type=int, default=1, help="packed rows of a batch, which all ranks share")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--accumulation", type=int, default=2, help="batches of an optimizer step")
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


def start() -> DeviceMesh:
    """Join the processes that torchrun started: a mesh of all of them."""
    if on_gpus():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus() else "gloo")
    return init_device_mesh("cuda" if on_gpus() else "cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


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


def own_part(rows: Iterator[dict[str, Tensor]], number: int) -> dict[str, Tensor]:
    """This rank's part of the next `number` rows, which go to the ranks in turn, one by one. {}: it has none."""
    mine = list(itertools.islice(rows, number))[dist.get_rank() :: dist.get_world_size()]
    return {name: torch.cat([row[name] for row in mine]) for name in TOKENS} if mine else {}


def planned(sharding: cp.Sharding, rows: Iterator[dict[str, Tensor]], args: argparse.Namespace) -> Generator[Any]:
    """The batches of all steps, one behind another, which a thread joins over ranks and plans ahead of time."""

    def own_batches() -> Iterator[dict[str, Any]]:
        while True:
            step = [own_part(rows, args.rows) for _ in range(args.accumulation)]
            yield from ({**batch, "num_items_in_batch": targets(step)} for batch in step)

    yield from sharding.batches(own_batches(), shift_labels=True)


def targets(batches: list[dict[str, Tensor]]) -> int:
    """This rank's targets in several batches, by which each loss is divided: they are summed over ranks."""
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches if batch)


def train_step(model: Any, optimizer: Any, blocks: Iterable[Any]) -> tuple[float, float, float]:
    """One optimizer step: (the mean loss over all tokens of all ranks, norm of its gradient, worst imbalance)."""
    total, imbalance = 0.0, 1.0
    for block in blocks:
        with block as local:
            loss = model(**local).loss
            imbalance = max(imbalance, local.plan.imbalance())
        loss.backward()
        total += loss.detach()
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(total), float(norm.full_tensor()), imbalance


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
