"""One attention layer of DeepSeek-V3's shape over packed documents: latents exchanged, or keys and values.

    torchrun --nproc-per-node 4 examples/bench/mla.py [--only "web_mix 8K"] [--heads 128]
    torchrun --nproc-per-node 2 examples/bench/mla.py
    torchrun --nproc-per-node 2 examples/bench/mla.py --errors

128 heads, keys of 128 + 64, values of 128, latents of 512 + 64, hidden 7168, queries by way of 1536; bf16, compiled by
Inductor. The layer is a norm, the projections, rotary positions, attention and the output projection; sums of weights'
gradients over the ranks are not timed. Ideal: the same layer on one GPU and the whole pack, which copies and exchanges
nothing, divided by the ranks, called in turns with each method. Medians, and of each call the slowest rank.

`attention`: keys and values travel, 81,920 bytes a token. `narrowest`: latents travel, 1,152 bytes, and are projected
up where they are read. FlashAttention 4 runs head dims (192, 128) on Hopper, forward and backward; the line at the top
says which kernel was chosen.

`--errors`: against the layer in fp32, relative norm, over that of one GPU in bf16, for a short pack and 16 heads.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attention import HEAD_START, in_turns, slowest
from methods import on_device, whole
from packs import Pack, packs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import cp_rewrite as cp
from cp_rewrite.kernels.select import AttentionSpec, Params, choose_kernel, device_facts
from cp_rewrite.ops.attention import attend_gathered
from cp_rewrite.planning.batch_plan import plan_batch

NOPE, ROPE, VALUE, LATENT, QUERY, HIDDEN = 128, 64, 128, 512, 1536, 7168
TOKENS = {"x": 1, "position_ids": 1, "doc_ids": 1}
METHODS: tuple[tuple[Any, Any], ...] = (
    ("needed", "attention"),
    ("all_gather", "attention"),
    ("needed", "narrowest"),
    ("all_gather", "narrowest"),
    ("auto", "auto"),
)
"""Exchange, and what travels."""


class Layer(nn.Module):
    """Multi-head latent attention."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.q_norm, self.kv_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(QUERY), nn.RMSNorm(LATENT)
        self.q_a = nn.Linear(HIDDEN, QUERY, bias=False)
        self.q_b = nn.Linear(QUERY, heads * (NOPE + ROPE), bias=False)
        self.kv_a = nn.Linear(HIDDEN, LATENT + ROPE, bias=False)
        self.kv_b = nn.Linear(LATENT, heads * (NOPE + VALUE), bias=False)
        self.o = nn.Linear(heads * VALUE, HIDDEN, bias=False)

    def operands(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, T, D) queries and keys, and values."""
        h = self.norm(x)
        frequency = 10000.0 ** (-torch.arange(0, ROPE, 2, device=x.device) / ROPE)
        angles = position_ids[:, None, :, None] * frequency
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q = self.q_b(self.q_norm(self.q_a(h))).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q_nope, q_rope = q.split([NOPE, ROPE], -1)
        latent, k_rope = self.kv_a(h).split([LATENT, ROPE], -1)
        kv = self.kv_b(self.kv_norm(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_nope, v = kv.split([NOPE, VALUE], -1)
        k_rope = rotate(k_rope.unsqueeze(1), cos, sin).expand(-1, self.heads, -1, -1)
        return torch.cat([q_nope, rotate(q_rope, cos, sin)], -1), torch.cat([k_nope, k_rope], -1), v

    def forward(self, x: Tensor, position_ids: Tensor, doc_ids: Tensor) -> Tensor:
        q, k, v = self.operands(x, position_ids)
        index = torch.arange(doc_ids.shape[1], device=doc_ids.device)
        mask = (doc_ids[:, :, None] == doc_ids[:, None, :]) & (index[:, None] >= index[None, :])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return self.o(out.transpose(1, 2).flatten(2))

    def alone(self, x: Tensor, position_ids: Tensor, tables: list[Tensor], kernel: str) -> Tensor:
        """The whole pack on one GPU."""
        q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in self.operands(x, position_ids))
        out = attend_gathered(q, k, v, tables, Params((NOPE + ROPE) ** -0.5), kernel)[0]
        return self.o(out.flatten(1)[None])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def batch_of(pack: Pack) -> dict[str, Tensor]:
    sizes = torch.tensor(pack.lengths)
    position_ids = torch.cat([torch.arange(length) for length in pack.lengths])
    doc_ids = torch.repeat_interleave(torch.arange(len(pack.lengths)), sizes)
    generator = torch.Generator("cuda").manual_seed(len(pack.lengths))
    x = torch.randn(1, pack.tokens, HIDDEN, generator=generator, device="cuda", dtype=torch.bfloat16)
    return {"x": x, "position_ids": position_ids[None].cuda(), "doc_ids": doc_ids[None].cuda()}


class Run:
    """A layer's forward and backward. The gradients of weights are dropped."""

    def __init__(self, layer: Layer, forward: Callable[[], Tensor], tokens: int) -> None:
        self.layer, self.call = layer, forward
        self.dout = torch.randn(1, tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def forward(self) -> Tensor:
        return self.call()

    def both(self) -> None:
        self.call().backward(self.dout)
        for weight in self.layer.parameters():
            weight.grad = None


def measured(run: Run, ideal: Run, repeats: int) -> tuple[float, float, float, float, float]:
    """Milliseconds of forward and of both directions, of the method and of one GPU; MiB at the peak."""
    for each in (run, ideal) * 2:  # the first compiles
        each.forward()
        each.both()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run.both()
    memory = slowest((torch.cuda.max_memory_allocated() - before) / 2**20)
    torch.cuda._sleep(HEAD_START)
    forward, best_forward = in_turns(run.forward, ideal.forward, repeats)
    both, best_both = in_turns(run.both, ideal.both, repeats)
    return forward, both, best_forward, best_both, memory


def run_pack(pack: Pack, layer: Layer, options: argparse.Namespace, kernel: str) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("cp",))
    if rank == 0:
        print(f"\n### {pack.name}: {len(pack.lengths)} documents, longest {max(pack.lengths)}, {pack.tokens} tokens\n")
        print("| exchange | travels | MB received | forward ms | backward ms | % of ideal f/b/both | MiB |")
        print("|---|---|---|---|---|---|---|")
    batch = batch_of(pack)
    tables = on_device(whole(pack).attention(0))
    received = int(plan_batch([pack.documents], ranks).schedule(pack.mask).received.sum(1).max())
    torch._dynamo.reset()
    alone: Any = torch.compile(layer.alone, dynamic=False)
    ideal = Run(layer, lambda: alone(batch["x"], batch["position_ids"], tables, kernel), pack.tokens)
    for exchange, at in METHODS:
        if options.methods and f"{exchange} {at}" not in options.methods.split(","):
            continue
        sharding = cp.Sharding(
            mesh, TOKENS, cp.DocumentIds("doc_ids"), exchange=exchange, exchange_at=at, kernel=options.kernel
        )
        compiled: Any = torch.compile(layer, backend=cp.backend(sharding), fullgraph=True)
        with sharding.shard(batch, lengths=pack.lengths) as local:
            run = Run(layer, lambda compiled=compiled, local=local: compiled(**local), local["x"].shape[1])
            forward, both, best_forward, best_both, memory = measured(run, ideal, options.repeats)
        del run, compiled
        pairs = ((forward, best_forward), (both - forward, best_both - best_forward), (both, best_both))
        percent = " / ".join(f"{100 * best / ranks / time:.0f}" for time, best in pairs)
        row_bytes = (LATENT + ROPE) * 2 if at == "narrowest" else layer.heads * (NOPE + ROPE + VALUE) * 2
        rows = (ranks - 1) * pack.tokens // ranks if exchange == "all_gather" else received
        megabytes = "–" if at == "auto" else f"{rows * row_bytes / 1e6:.1f}"
        if rank == 0:
            times = f"{megabytes} | {forward:.3f} | {both - forward:.3f} | {percent} | {memory:.0f}"
            print(f"| {exchange} | {at} | {times} |", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


def results(layer: Layer, forward: Callable[[], Tensor], dout: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Output, and gradients of weights, in fp32."""
    layer.zero_grad()
    out = forward()
    out.backward(dout.to(out.dtype))
    return out.detach().float(), {name: weight.grad.float() for name, weight in layer.named_parameters()}  # type: ignore[union-attr]


def show_errors(kernel: Any) -> None:
    """The worst ratio of output and gradients, in every way that something travels."""
    pack, layer = Pack("drawn", (700, 1, 130, 3000, 265)), Layer(16).to("cuda", torch.bfloat16)
    for weight in layer.parameters():
        dist.broadcast(weight.data, 0)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    batch = batch_of(pack)
    batch["dout"] = batch["x"].flip(1)
    exact, tables = copy.deepcopy(layer).float(), on_device(whole(pack).attention(0))
    truth = results(exact, lambda: exact(batch["x"].float(), batch["position_ids"], batch["doc_ids"]), batch["dout"])
    forward = partial(layer.alone, batch["x"], batch["position_ids"], tables, kernel)
    alone = relative(results(layer, forward, batch["dout"]), truth)
    for exchange, at in METHODS:
        sharding = cp.Sharding(
            mesh, TOKENS | {"dout": 1}, cp.DocumentIds("doc_ids"), exchange=exchange, exchange_at=at, kernel=kernel
        )
        compiled: Any = torch.compile(layer, backend=cp.backend(sharding), fullgraph=True)
        with sharding.shard(batch, lengths=pack.lengths) as local:
            dout = local.pop("dout")
            out, grads = results(layer, partial(compiled, **local), dout)
            found = relative((sharding.unshard(out, 1), summed(grads)), truth)
        ratios = {name: found[name] / alone[name] for name in found}
        worst = max(ratios, key=ratios.__getitem__)
        if dist.get_rank() == 0:
            print(f"{exchange}, {at}: worst ratio {ratios[worst]:.2f}, of {worst}; of the output {ratios['out']:.2f}")


def summed(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    for grad in grads.values():
        dist.all_reduce(grad)
    return grads


def relative(found: tuple[Tensor, dict[str, Tensor]], truth: tuple[Tensor, dict[str, Tensor]]) -> dict[str, float]:
    """Relative norms of the differences, by name."""
    pairs = {name: (grad, truth[1][name]) for name, grad in found[1].items()} | {"out": (found[0], truth[0])}
    return {name: float((x - y).norm() / y.norm()) for name, (x, y) in pairs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--only", default="web_mix,one", help="packs whose name holds one of these texts")
    parser.add_argument("--methods", default="", help="as in 'needed narrowest,auto auto'; all when left out")
    parser.add_argument("--most", type=int, default=65536, help="leave out longer packs: one GPU runs them whole")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--errors", action="store_true", help="errors in the place of times")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    layer = Layer(options.heads).to(device, torch.bfloat16)
    spec = AttentionSpec(torch.bfloat16, NOPE + ROPE, VALUE, options.heads, options.heads)
    choice = choose_kernel(spec, device_facts(device), options.kernel)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} x {torch.cuda.get_device_name()}, torch {torch.__version__}, {choice}")
    assert choice.kernel is not None
    if options.errors:
        show_errors(choice.kernel)
    for pack in () if options.errors else packs(dist.get_world_size()):
        if pack.tokens <= options.most and any(text in pack.name for text in options.only.split(",")):
            run_pack(pack, layer, options, choice.kernel)
    # All ranks are done with each other's memory before any lets go of it.
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
