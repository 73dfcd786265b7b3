"""Train a checkpoint of Hugging Face on packed text, with FSDP2 and context parallelism, and save it as one.

    torchrun --nproc-per-node 8 examples/train_checkpoint.py Llama-3.1-8B --data texts --tokens 131072 --checkpointing

The folder holds config, tokenizer and safetensors. No process holds the whole model: it is made without memory,
sharded, and each rank reads its part of the files (rank 0 reads all where these have other names, as of single
experts). Run it again with the same --out and it goes on where its last checkpoint is. `--out`/final is a folder that
`from_pretrained` reads. The loop is that of train_fsdp.py beside it.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm
from train_fsdp import TOKENS, on_gpus, own_part, packed_rows, planned, resume, save, start, targets, train_step
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import cp_rewrite as cp

HELD_OUT = 20
"""One of so many documents is for evaluation."""


def main() -> None:
    args = parse_args()
    check_folder(args.folder)
    mesh = start()
    tile = "auto" if args.tile else None
    sharding = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), rows="own", inner=args.inner, tile=tile)
    model = load(args, mesh, sharding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay)
    state = {"step": 0}
    resume(model, optimizer, state, args.out)
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    given = state["step"] * args.accumulation * args.rows
    rows = packed_rows(documents(args, tokenizer, held_out=False), args.tokens, skip=given)
    eval_rows = packed_rows(documents(args, tokenizer, held_out=True), args.tokens, skip=0)
    held_out = [own_part(eval_rows, args.rows) for _ in range(args.eval_batches)]
    bar = tqdm(total=args.steps, initial=state["step"], disable=dist.get_rank() > 0)
    with closing(planned(sharding, rows, args)) as blocks:
        while state["step"] < args.steps:
            optimizer.param_groups[0]["lr"] = args.lr * share_of_rate(state["step"], args.warmup, args.steps)
            loss, norm, imbalance = train_step(model, optimizer, itertools.islice(blocks, args.accumulation))
            state["step"] += 1
            bar.set_postfix_str(f"loss {loss:.4f}, norm {norm:.2f}, imbalance {imbalance:.3f}")
            bar.update()
            if state["step"] % args.save_every == 0 or state["step"] == args.steps:
                save(model, optimizer, state, args.out)
    bar.close()
    loss = evaluate(model, sharding, held_out)
    if dist.get_rank() == 0:
        print(f"step {state['step']}: loss of held-out text {loss:.6f}")
    export(model, args.folder, args.out / "final")
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of a causal language model: config.json, tokenizer, *.safetensors")
    data = "folder of *.txt and *.md, of `Dataset.save_to_disk`, or the name of a data set on the hub"
    parser.add_argument("--data", required=True, help=data)
    parser.add_argument("--column", default="text", help="of a data set: what holds the text")
    parser.add_argument("--rows", type=int, default=1, help="packed rows of a batch, which all ranks share")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--accumulation", type=int, default=1, help="batches of an optimizer step")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per packed row")
    parser.add_argument("--lr", type=float, default=1e-5, help="the largest rate: after --warmup, before a cosine")
    parser.add_argument("--warmup", type=int, default=10, help="steps")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--checkpointing", action="store_true", help="compute blocks again in the backward")
    parser.add_argument("--tile", action="store_true", help="heads and MLPs run over some rows at a time")
    parser.add_argument("--offload", nargs="+", default=[], choices=["checkpoints", "weights"], help="to the host")
    parser.add_argument("--eval-batches", type=int, default=4, help="of held-out documents")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints to resume from")
    parser.add_argument("--out", type=Path, default=Path("out/train_checkpoint"))
    parser.add_argument(
        "--inner", help="inductor | aot_eager | eager", default="inductor" if on_gpus() else "aot_eager"
    )
    return parser.parse_args()


def check_folder(folder: str) -> None:
    """Ends the program where a folder lacks what the model is made of, before anything is."""
    missing = [name for name in ("config.json", "*.safetensors") if not any(Path(folder).glob(name))]
    if missing:
        raise SystemExit(
            f"{folder} holds no {' and no '.join(missing)}: give the folder of a whole checkpoint, such as "
            "model.save_pretrained(folder) and tokenizer.save_pretrained(folder) of transformers write it"
        )


def load(args: argparse.Namespace, mesh: DeviceMesh, sharding: cp.Sharding) -> Any:
    """The checkpoint's model, its fp32 weights sharded over all ranks; blocks compute in bf16 on GPUs."""
    config = AutoConfig.from_pretrained(args.folder, use_cache=False)  # with a cache the packed mask is dropped
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model.tie_weights()  # which became two
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # rotary frequencies are in no file
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_gpus() else None
    model = cp.parallelize(model.to("meta"), mesh, sharding, mp_policy=half, offload=args.offload)
    model.to_empty(device="cpu" if "weights" in args.offload else mesh.device_type)
    for name, buffer in buffers.items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, buffer.to(mesh.device_type))
    read(model, args.folder)
    return model


def read(model: nn.Module, folder: str) -> None:
    """Give a sharded model the weights of a folder: each rank reads its parts. Where files have other names than the
    model, as of single experts, rank 0 reads all by `from_pretrained` and hands parts out."""
    given, reader = loadable(model), HuggingFaceStorageReader(folder)
    if given.keys() <= reader.read_metadata().state_dict_metadata.keys():
        dcp.load(given, storage_reader=reader)
        return
    whole, missing = dict[str, Any](), [set[str]()]
    if dist.get_rank() == 0:
        plain, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        whole, missing = plain.state_dict(), [found["missing_keys"]]
    dist.broadcast_object_list(missing)
    if missing[0]:
        raise SystemExit(f"{folder} lacks {', '.join(sorted(missing[0]))}")
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def loadable(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that a file must hold: all weights and kept buffers, each by its first name where a head is tied."""
    names = {name for name, _ in itertools.chain(model.named_parameters(), model.named_buffers())}
    return {name: value for name, value in model.state_dict().items() if name in names}


def documents(args: argparse.Namespace, tokenizer: Any, held_out: bool) -> Iterator[Tensor]:
    """Token ids of each document, again and again: those that are held out, or all others."""
    while True:
        count = 0
        for number, text in enumerate(texts(args)):
            if (number % HELD_OUT == 0) == held_out:
                ids = tokenizer(text).input_ids
                count += 1
                yield torch.tensor(ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id])
        if not count:
            raise SystemExit(f"{args.data} holds too few documents: one of {HELD_OUT} is for evaluation")


def texts(args: argparse.Namespace) -> Iterator[str]:
    folder = Path(args.data)
    if folder.is_dir() and not (folder / "dataset_info.json").exists():
        yield from (file.read_text() for file in sorted([*folder.rglob("*.txt"), *folder.rglob("*.md")]))
        return
    import datasets

    found: Any = datasets.load_from_disk(args.data) if folder.is_dir() else datasets.load_dataset(args.data)
    yield from (row[args.column] for row in (found["train"] if "train" in found else found))


def share_of_rate(step: int, warmup: int, steps: int) -> float:
    """Linear up to 1 in `warmup` steps, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


@torch.no_grad()
def evaluate(model: Any, sharding: cp.Sharding, batches: list[dict[str, Tensor]]) -> float:
    """The mean loss over all targets of all ranks."""
    total, count = 0.0, targets(batches)
    model.eval()
    for batch in batches:
        with sharding.shard({**batch, "num_items_in_batch": count}, shift_labels=True) as local:
            total += float(model(**local).loss)
    model.train()
    return total


def export(model: Any, source: str, folder: Path) -> None:
    """A folder that `from_pretrained` reads, with config, tokenizer and dtype of the checkpoint that was loaded. All
    ranks gather, rank 0 writes."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        config = AutoConfig.from_pretrained(source)
        model.save_pretrained(folder, state_dict={name: value.to(config.dtype) for name, value in weights.items()})
        config.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    dist.barrier()


if __name__ == "__main__":
    main()
