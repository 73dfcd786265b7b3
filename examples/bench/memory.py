"""Peak memory and speed of training steps beside what `python -m cp_rewrite memory` predicts.

    torchrun --nproc-per-node 2 examples/bench/memory.py llama-1.1b:131072:checkpointed,tile \\
        llama-1.1b:131072:checkpointed,tile,wrapped llama-1.1b:131072:checkpointed,tile

A setting is MODEL:TOKENS:OPTIONS, tokens of the row of all ranks; options are `checkpointed`, `tile`, `host`
(checkpoints there), `host-weights`, `wrapped` (in a module that returns the loss alone), `fp32` (no bf16; slow),
`deterministic` (sums in a fixed order, so that equal computations give equal gradients), and of FSDP `whole` (weights
stay behind the forward), `ahead1`, `ahead2` (prefetch of so many blocks) and `bf16-sums` (of gradients). Each is a
Llama or a Qwen3-MoE of transformers, unmodified, by README's lines: FSDP2, bf16 over fp32 weights, AdamW, one row of
packed documents. Peaks are those of the fullest rank, seconds those of the median step behind the first. Gradients of
the first step are compared with those of the model's first setting with as many tokens, as deterministic: the relative
norm of the difference, over all weights and of the worst one. A setting that is given twice shows how far two runs are
apart. A setting that runs out of memory says so; put it last.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import cp_rewrite as cp
from cp_rewrite.diagnose.config import explain_config
from cp_rewrite.diagnose.target import Target
from cp_rewrite.planning.cost.memory import GIB, predict

TOKENS = {"input_ids": 1, "position_ids": 1, "labels": 1}
MODELS = {  # layers, width, inside of MLPs or experts, heads, key heads, vocabulary, size of heads, experts
    "llama-0.9b": (16, 2048, 7168, 16, 4, 320, 128, 0),
    "llama-1.1b": (16, 2048, 7168, 16, 4, 128_256, 128, 0),
    "llama-8b": (32, 4096, 14336, 32, 8, 128_256, 128, 0),
    "llama-8b-of-8-layers": (8, 4096, 14336, 32, 8, 128_256, 128, 0),
    "qwen3-30b-a3b-of-4-layers": (4, 2048, 768, 32, 4, 151_936, 128, 128),
    "llama-3b-of-8-layers": (8, 3072, 8192, 24, 8, 128_256, 128, 0),
    "qwen2-7b-of-6-layers": (6, 3584, 18944, 28, 4, 152_064, 128, 0),
    "width-5120-of-5-layers": (5, 5120, 14336, 32, 8, 32_768, 160, 0),
    "gpt-width-1024": (16, 1024, 2816, 16, 16, 50_304, 64, 0),
    "experts-64-of-4-layers": (4, 2048, 1408, 16, 16, 102_400, 128, 64),
    "tiny": (4, 128, 448, 2, 1, 8192, 64, 0),
    "tiny-experts": (2, 128, 96, 2, 1, 8192, 64, 8),
}
OPTIONS = (
    "checkpointed", "tile", "host", "host-weights", "wrapped", "fp32", "deterministic", "whole", "ahead1", "ahead2",
    "bf16-sums",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One line of the table."""

    name: str
    model: str
    tokens: int
    options: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> Setting:
        model, tokens, *options = text.split(":")
        chosen = tuple(options[0].split(",")) if options else ()
        if model not in MODELS or not set(chosen) <= set(OPTIONS):
            raise argparse.ArgumentTypeError(f"{text}: models are {[*MODELS]}, options {OPTIONS}")
        return cls(text, model, int(tokens), chosen)

    @property
    def of(self) -> tuple[str, int, bool]:
        """(model, tokens, deterministic): equal in settings that are compared."""
        return self.model, self.tokens, self.deterministic

    @property
    def deterministic(self) -> bool:
        return "deterministic" in self.options

    @property
    def offload(self) -> tuple[Any, ...]:
        names = {"host": "checkpoints", "host-weights": "weights"}
        return tuple(names[option] for option in self.options if option in names)

    @property
    def prefetch(self) -> int | None:
        return next((int(option[-1]) for option in self.options if option.startswith("ahead")), None)

    def config(self) -> PretrainedConfig:
        layers, width, inside, heads, heads_kv, vocabulary, head_dim, experts = MODELS[self.model]
        sizes: dict[str, Any] = {
            "vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": heads_kv, "head_dim": head_dim, "use_cache": False,
            "max_position_embeddings": 1 << 20,
        }  # fmt: skip
        if not experts:
            return LlamaConfig(**sizes, intermediate_size=inside, architectures=["LlamaForCausalLM"])
        return Qwen3MoeConfig(
            **sizes, intermediate_size=inside, moe_intermediate_size=inside, num_experts=experts,
            num_experts_per_tok=min(8, experts // 2), norm_topk_prob=True, architectures=["Qwen3MoeForCausalLM"],
        )  # fmt: skip


@dataclass(frozen=True)
class Found:
    """GiB at the worst moment of forward, backward and optimizer; seconds of a step; the first loss and norm; how far
    gradients are from those of the same model's first setting, over all weights and of the worst."""

    forward: float
    backward: float
    optimizer: float
    seconds: float
    loss: float
    norm: float
    apart: float = 0.0
    worst: float = 0.0

    @property
    def peak(self) -> float:
        return max(self.forward, self.backward, self.optimizer)


class LossAlone(nn.Module):
    """A language model that returns its loss, and not its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        return {"loss": self.model(**batch).loss}


def make_model(setting: Setting) -> nn.Module:
    """On `meta`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(setting.config())
    if "checkpointed" in setting.options:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return LossAlone(model) if "wrapped" in setting.options else model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="+", type=Setting.read)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--predict", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager", "eager"])
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda" if gpu else "cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    if dist.get_rank() == 0:
        device = torch.cuda.get_device_name() if gpu else "CPU"
        print(f"{dist.get_world_size()} x {device}, torch {torch.__version__}\n{HEAD}", flush=True)
    kept: Kept = {}
    for place, setting in enumerate(args.settings):
        compared = setting.of in kept or setting.of in [other.of for other in args.settings[place + 1 :]]
        found = measured(setting, mesh, args, kept if compared else None)
        if dist.get_rank() == 0:
            print(row_of(setting, found, dist.get_world_size() if args.predict else 0), flush=True)
    dist.destroy_process_group()


Kept = dict[tuple[str, int, bool], list[Tensor]]
"""Gradients of this rank's parts of the weights, on the host, of the first setting of a model and its tokens."""


def measured(setting: Setting, mesh: DeviceMesh, args: argparse.Namespace, kept: Kept | None) -> Found | str:
    """Largest figures of all ranks for a setting; where any rank has none, a text that says why, on all of them."""
    torch._dynamo.reset()
    gc.collect()
    if mesh.device_type == "cuda":
        torch.cuda.empty_cache()
    try:
        found, error = run(setting, mesh, args, kept), ""
    except torch.OutOfMemoryError as raised:
        found, error = None, f"out of memory: {str(raised).split('. ')[1]}"
    worst = torch.tensor([0.0] * len(fields(Found)) if found is None else [*asdict(found).values()])
    failed = torch.tensor(float(found is None))
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return (error or "out of memory on another rank") if failed else Found(*worst.tolist())


def run(setting: Setting, mesh: DeviceMesh, args: argparse.Namespace, kept: Kept | None) -> Found:
    """The steps of a setting."""
    device = torch.device(mesh.device_type)
    before = torch.cuda.memory_allocated() / GIB if device.type == "cuda" else 0.0  # what earlier settings left
    tile = "auto" if "tile" in setting.options else None
    torch.use_deterministic_algorithms(setting.deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # takes time, and changes no result
    sharding = cp.Sharding(
        mesh["cp"], TOKENS, cp.PositionIds("position_ids"), inner=args.inner, tile=tile,
        deterministic=setting.deterministic,
    )  # fmt: skip
    exact = device.type == "cpu" or "fp32" in setting.options
    sums = torch.bfloat16 if "bf16-sums" in setting.options else torch.float32
    policy = MixedPrecisionPolicy(None if exact else torch.bfloat16, sums)
    model = cp.parallelize(
        make_model(setting), mesh, sharding, mp_policy=policy, offload=setting.offload, prefetch=setting.prefetch,
        reshard_after_forward="whole" not in setting.options,
    )  # fmt: skip
    fill(model, setting, torch.device("cpu") if "host-weights" in setting.options else device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()  # so that its states are there in the first step
    optimizer.zero_grad()
    batch, times, peaks, first, apart = make_batch(setting), list[float](), [0.0] * 3, (0.0, 0.0), (0.0, 0.0)
    for step in range(args.steps):
        start = time.perf_counter()
        moments: list[float] = [peak(device)]
        with sharding.shard(batch, shift_labels=True) as local:
            loss = model(**local)["loss"]
            moments.append(peak(device))
            loss.backward()
        moments.append(peak(device))
        if not step and kept is not None:
            apart = compare(model, kept.setdefault(setting.of, []))
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        moments.append(peak(device))
        first = first if step else (loss.item(), float(norm.full_tensor()))
        peaks = [max(pair) for pair in zip(peaks, moments[1:], strict=True)]
        times.append(time.perf_counter() - start)
    later = sorted(times[1:]) or times
    forward, backward, stepped = (found - before for found in peaks)
    return Found(forward, backward, stepped, later[len(later) // 2], *first, *apart)


def compare(model: nn.Module, first: list[Tensor]) -> tuple[float, float]:
    """How far gradients are from those in `first`, relative to these: over all weights, and of the worst one. Puts them
    there where it is empty."""
    grads: list[Any] = [weight.grad for weight in model.parameters()]
    here = [grad.to_local().cpu() for grad in grads]
    if not first:
        first += [grad.clone() for grad in here]
    pairs = [[(a - b).square().sum(), b.square().sum()] for a, b in zip(here, first, strict=True)]
    squares = torch.tensor(pairs, dtype=torch.float64)
    dist.all_reduce(squares)
    each, whole = (squares[:, 0] / squares[:, 1]).sqrt(), (squares[:, 0].sum() / squares[:, 1].sum()).sqrt()
    return float(whole), float(each.max())


def peak(device: torch.device) -> float:
    """GiB that torch allocated at most since the last call; the GPU is done with all that it was given."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() / GIB
    torch.cuda.reset_peak_memory_stats()
    return found


def fill(model: Any, setting: Setting, where: torch.device) -> None:
    """Memory and numbers for the weights that this rank holds, and for buffers."""
    model.to_empty(device=where)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for weight in model.parameters():
            local = weight.to_local()
            local.fill_(1.0) if weight.ndim == 1 else local.normal_(std=0.02)
        rotary = LlamaRotaryEmbedding(setting.config())
        for name, buffer in rotary.named_buffers():
            for module in model.modules():
                if name in module._buffers:
                    module._buffers[name] = buffer.to("cuda" if torch.cuda.is_available() else "cpu")


def make_batch(setting: Setting) -> dict[str, Tensor]:
    """One row of documents of 2,000 to 16,000 tokens, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    tokens, left, positions = setting.tokens, setting.tokens, list[Tensor]()
    while left:
        length = min(left, int(torch.randint(min(2000, tokens), min(16000, tokens) + 1, (), generator=generator)))
        positions.append(torch.arange(length))
        left -= length
    ids = torch.randint(0, setting.config().vocab_size, (1, tokens), generator=generator)
    return {"input_ids": ids, "position_ids": torch.cat(positions)[None], "labels": ids.clone()}


HEAD = """\
| setting | GiB: forward, backward, optimizer | peak | predicted | s/step | tokens/s | loss | norm | gradients apart |
|---|---|---|---|---|---|---|---|---|"""


def row_of(setting: Setting, found: Found | str, world: int) -> str:
    """A line of the table, with the peak that is predicted for so many ranks; 0: with none."""
    predicted = forecast(setting, world) if world else 0.0
    if isinstance(found, str):
        return f"| {setting.name} | {found} | – | {predicted:.1f} | – | – | – | – | – |"
    by_moment = f"{found.forward:.1f}, {found.backward:.1f}, {found.optimizer:.1f}"
    off = f"{100 * (predicted / found.peak - 1):+.0f} %" if found.peak else "–"
    speed = f"{found.seconds:.3f} | {setting.tokens / found.seconds:,.0f} | {found.loss:.5f} | {found.norm:.5f}"
    apart = f"{found.apart:.1e}, worst {found.worst:.1e}"
    return f"| {setting.name} | {by_moment} | {found.peak:.1f} | {predicted:.1f} ({off}) | {speed} | {apart} |"


def forecast(setting: Setting, world: int) -> float:
    """GiB."""
    with tempfile.TemporaryDirectory() as folder:
        setting.config().save_pretrained(folder)
        lengths = [*map(len, documents(setting))]
        tile = "auto" if "tile" in setting.options else None
        target: Target | None = explain_config(folder, lengths, world, speeds="h200", tile=tile).target
    assert target is not None
    assert target.needs is not None
    needs = target.needs.of_loss() if "wrapped" in setting.options else target.needs
    needs = needs.checkpointed() if "checkpointed" in setting.options else needs
    gathered = {"resharded": "whole" not in setting.options, "prefetch": setting.prefetch or 1}
    memory = predict(needs, replace(target.share(), on_host=setting.offload, accumulated=False, **gathered))
    print(json.dumps({"setting": setting.name, "at": memory.at, **memory.parts}), file=sys.stderr)
    return memory.peak / GIB


def documents(setting: Setting) -> list[Tensor]:
    positions = make_batch(setting)["position_ids"][0]
    return list(positions.tensor_split((positions == 0).nonzero().flatten()[1:].tolist()))


if __name__ == "__main__":
    main()
