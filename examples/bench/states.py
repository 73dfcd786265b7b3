"""Recurrent states on the pieces of ranks: delta rules, SSD and selective scans, beside one GPU and fla's own context
parallelism.

    torchrun --nproc-per-node 2 examples/bench/states.py [--kinds gated_delta_rule,ssd] [--heads 32,64] [--tokens 32768]
    torchrun --nproc-per-node 2 examples/bench/states.py --group     a group of layers of Qwen3-Next
    torchrun --nproc-per-node 2 examples/bench/states.py --tiny      on CPUs, by the reference: that it runs

Forward and backward of the states of one layer, K = V = 128 (SSD: heads of 64, states of 128; selective scans: 128
channels in the place of a head, 16 numbers for each), bf16. Ideal: all tokens on one GPU, divided by the ranks.
`balanced` is the layout that attention has. fla's CP needs contiguous slices of the row, for which layers of attention
have to change the layout and change it back: `converted` exchanges hidden states four times, in and out, forward and
backward. Each is called in turns with one GPU; medians, of the slowest rank.

fla refuses one of its kernels on Hopper with Triton 3.4 to 3.7.0, whose gradients are wrong there. Its CP is timed with
it all the same: in time nothing is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attention import in_turns
from packs import Pack, draw
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import cp_rewrite as cp
from cp_rewrite.ops.states import ops as pieces
from cp_rewrite.planning.batch_plan import plan_batch
from cp_rewrite.planning.plan_input import STATES, States
from cp_rewrite.planning.states import state_tables

ops: Any = torch.ops.cp_rewrite
KINDS = ("gated_delta_rule", "kimi_delta", "ssd", "selective_scan")
assert pieces


class Problem:
    """Inputs of one layer's states on this rank's device, the same on all ranks."""

    def __init__(self, kind: str, pack: Pack, heads: int, dim: int, device: str) -> None:
        self.kind, self.pack, self.device, self.dim = kind, pack, device, dim
        generator = torch.Generator(device).manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32

        def normal(*shape: int) -> Tensor:
            return torch.randn(1, pack.tokens, *shape, generator=generator, device=device)

        if kind == "ssd":
            rate = -torch.linspace(0.5, 4.0, heads, device=device)
            half = [normal(heads, dim // 2), normal(8, dim), normal(8, dim)]
            x, write, look = (t.to(dtype) for t in half)
            self.inputs = [x, 0.2 * F.softplus(normal(heads)), rate, write, look]
        elif kind == "selective_scan":
            rate = -torch.arange(1.0, 17, device=device).repeat(heads * dim, 1)
            rows = normal(heads * dim), 0.02 * F.softplus(normal(heads * dim)), normal(16), normal(16)
            x, dt, write, look = (t.to(dtype) for t in rows)
            self.inputs = [x, dt, rate, write, look]
        else:
            decay = -0.1 * F.softplus(normal(heads, *([dim] if kind == "kimi_delta" else [])))
            q, k, v = (normal(heads, dim).to(dtype) for _ in range(3))
            self.inputs = [q, k, v, decay, normal(heads).sigmoid().to(dtype)]
        self.dout = torch.randn_like(self.inputs[0])
        self.how: tuple[Any, ...] = () if kind in ("ssd", "selective_scan") else (dim**-0.5, True)
        self.offsets = torch.tensor([0, *accumulate(pack.lengths)], dtype=torch.int32, device=device)

    def step(self, run: Callable[[Sequence[Tensor]], Tensor], rows: Any = slice(None)) -> Callable[[], list[Tensor]]:
        """Forward and backward on some rows: gives the gradients."""
        leaves = [(x if x.ndim < 3 else x[:, rows].contiguous()).clone().requires_grad_() for x in self.inputs]
        dout = self.dout[:, rows].contiguous()

        def both() -> list[Tensor]:
            out = run(leaves)
            return list(torch.autograd.grad(out, leaves, dout.to(out.dtype)))

        return both

    def one_gpu(self) -> Callable[[], list[Tensor]]:
        """By the op of this package, on all rows."""
        return self._on_pieces("contiguous", 0, 1, "")

    def on_pieces(self, layout: str, group: dist.ProcessGroup) -> Callable[[], list[Tensor]]:
        """The same, on the rank's rows of a layout."""
        return self._on_pieces(layout, dist.get_rank(), dist.get_world_size(), group.group_name)

    def _on_pieces(self, layout: str, rank: int, size: int, group: str) -> Callable[[], list[Tensor]]:
        plan = plan_batch([self.pack.documents], size, layout, self.pack.mask)
        arrays = state_tables(plan, States(resets=True), rank)
        tables = [torch.from_numpy(arrays[t.name]).to("cpu" if t.on_host else self.device) for t in STATES]
        rows = torch.from_numpy(plan.filled_indices(rank)[0]).to(self.device)
        op = getattr(ops, f"{self.kind}_on_pieces")
        return self.step(lambda x: op(*x, tables, *self.how, group)[0], rows)

    def by_fla(self, group: dist.ProcessGroup) -> Callable[[], list[Tensor]]:
        """By fla's context parallelism, on the rank's slice of the row."""
        import fla.ops.common.chunk_o as chunk_o
        from fla.ops.cp import build_cp_context
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

        chunk_o.TRITON_ABOVE_3_7_1 = True
        run = {"gated_delta_rule": chunk_gated_delta_rule, "kimi_delta": chunk_kda}[self.kind]
        context = build_cp_context(self.offsets, group)
        mine = self.pack.tokens // dist.get_world_size()
        rows = slice(dist.get_rank() * mine, (dist.get_rank() + 1) * mine)
        scale, norm = self.how
        return self.step(lambda x: run(*x, scale=scale, use_qk_l2norm_in_kernel=norm, cp_context=context)[0], rows)

    def converted(self, group: dist.ProcessGroup) -> Callable[[], list[Tensor]]:
        """The same in a model whose attention has the balanced layout: hidden states, as wide as 64 numbers for each
        head, change the layout before the layer and back behind it, and so do their gradients."""
        rank, size, width = dist.get_rank(), dist.get_world_size(), 64 * self.inputs[1].shape[2]
        plan = plan_batch([self.pack.documents], size, "balanced", self.pack.mask)
        owners = [torch.from_numpy(plan.filled_indices(r)[0]) * size // self.pack.tokens for r in range(size)]
        sent = owners[rank].bincount(minlength=size).tolist()
        received = [int((owner == rank).sum()) for owner in owners]
        order = owners[rank].argsort(stable=True).to(self.device)
        hidden = self.dout.new_zeros(len(order), width)
        run = self.by_fla(group)

        def convert() -> None:
            arrived = hidden.new_empty(sum(received), width)
            dist.all_to_all_single(arrived, hidden[order], received, sent, group=group)
            arrived[torch.arange(len(arrived), device=self.device).flip(0)]  # sorted by token, as far as time goes

        def both() -> list[Tensor]:
            for _ in range(4):
                convert()
            return run()

        return both


def measure(problem: Problem, group: dist.ProcessGroup, repeats: int) -> None:
    """Prints the lines of a table."""
    alone, ranks = problem.one_gpu(), dist.get_world_size()
    ways = {layout: partial(problem.on_pieces, layout, group) for layout in ("balanced", "contiguous", "dual_chunk")}
    if problem.how and importlib.util.find_spec("fla") and problem.device == "cuda":
        ways["fla's CP"] = partial(problem.by_fla, group)
        ways["fla's CP, converted"] = partial(problem.converted, group)
    for name, made in ways.items():
        step = made()
        for _ in range(2):  # Triton tunes its kernels
            step()
            alone()
        if problem.device == "cuda":
            mine, ideal = in_turns(step, alone, repeats)
            cells = f"{mine:.2f} | {ideal:.2f} | {100 * ideal / ranks / mine:.0f}"
        else:
            cells = "– | – | –"
        if dist.get_rank() == 0:
            heads = problem.inputs[1].shape[2]
            print(f"| {problem.kind} | {heads} | {problem.pack.name} | {name} | {cells} |", flush=True)


class Group(nn.Module):
    """Layers of Qwen3-Next: three of gated delta rules and one of attention, with MLPs as wide as the experts of a
    token."""

    def __init__(self, tiny: bool) -> None:
        super().__init__()
        from transformers import Qwen3NextConfig, Qwen3NextModel

        small: dict[str, Any] = dict(
            hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
            linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2,
        )  # fmt: skip
        config = Qwen3NextConfig(
            num_hidden_layers=4, mlp_only_layers=[0, 1, 2, 3], vocab_size=1024, attn_implementation="sdpa",
            **(small if tiny else {"intermediate_size": 5632}),
        )  # fmt: skip
        self.model = Qwen3NextModel(config)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        states = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return states.float().square().sum()


def batch_of(pack: Pack) -> dict[str, Tensor]:
    """The row of a pack, on the CPU, the same on all ranks."""
    input_ids = torch.randint(0, 1024, (1, pack.tokens), generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": input_ids,
        "position_ids": torch.cat([torch.arange(length) for length in pack.lengths])[None],
    }


def group_step(mesh: DeviceMesh, device: str) -> Callable[[dict[str, Tensor]], None]:
    """Forward and backward of the group of layers on a batch."""
    tiny = device == "cpu"
    torch.manual_seed(0)
    model = Group(tiny).to(device, torch.float32 if tiny else torch.bfloat16)
    packing, tokens = cp.PositionIds("position_ids"), {"input_ids": 1, "position_ids": 1}
    sharding = cp.Sharding(mesh, tokens, packing, inner="aot_eager" if tiny else "inductor")
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)

    def step(batch: dict[str, Tensor]) -> None:
        with sharding.shard(batch) as local:
            compiled(**local).backward()

    return step


def measure_group(packs: Sequence[Pack], device: str, repeats: int) -> None:
    """Prints a line for each pack: the step of the group on all GPUs, and on one."""
    size = dist.get_world_size()
    names = ("dp", "cp")
    many, one = (
        group_step(init_device_mesh(device, shape, mesh_dim_names=names)["cp"], device)
        for shape in ((1, size), (size, 1))
    )
    for pack in packs:
        batch = batch_of(pack)
        for _ in range(2):  # compiles, and Triton tunes its kernels
            many(batch)
            one(batch)
        cells = "– | – | –"
        if device == "cuda":
            mine, ideal = in_turns(partial(many, batch), partial(one, batch), repeats)
            cells = f"{mine:.1f} | {ideal:.1f} | {100 * ideal / size / mine:.0f}"
        if dist.get_rank() == 0:
            print(f"| Qwen3-Next, 3 + 1 layers | {pack.name} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--heads", default="32,64")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--group", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = "cpu" if args.tiny else "cuda"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if args.tiny else "cpu:gloo,cuda:nccl")
    tokens, dim = (192, 8) if args.tiny else (args.tokens, 128)
    lengths = (100, 1, 91) if args.tiny else draw("web_mix", tokens, 176)
    found = [Pack(f"{len(lengths)} documents", lengths), Pack("one document", (tokens,))]
    if args.group:
        measure_group(found, device, args.repeats)
    else:
        assert dist.group.WORLD is not None
        for kind in args.kinds.split(","):
            for heads in (8,) if args.tiny else map(int, args.heads.split(",")):
                for pack in found:
                    measure(Problem(kind, pack, heads, dim, device), dist.group.WORLD, args.repeats)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
