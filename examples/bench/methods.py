"""Methods of the attention benchmark: ours in every layout and exchange, and plain NCCL ways around one kernel.

A method holds one rank's tensors and runs `forward()` and `backward()`; all ranks call them together.
Shapes: R local rows, E expanded rows, P ranks, H query heads, K key heads, D head dim, C = 2 K D.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from packs import Pack
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import cp_rewrite as cp
from cp_rewrite.entry import Backend
from cp_rewrite.kernels.select import Params, Tables, capabilities, load
from cp_rewrite.masks import PackedMask
from cp_rewrite.ops.attention import travels_beside
from cp_rewrite.ops.exchange import CARRIERS, exchange_kv, return_kv
from cp_rewrite.ops.local_rows import split_kv
from cp_rewrite.passes.values.state import Decision, State
from cp_rewrite.planning.batch_plan import BatchPlan, plan_batch
from cp_rewrite.planning.cost.devices import Model, SiteKind
from cp_rewrite.planning.plan_input import KERNEL_TABLES, PlanTensor
from cp_rewrite.planning.routes.by_exchange import ROUTES, Exchange
from cp_rewrite.planning.schedule import Schedule

_ops: Any = torch.ops.cp_rewrite
CAUSAL = PackedMask()


@dataclass(frozen=True)
class Setup:
    """Args: rank, world_size, group (name). heads, heads_kv, dim, dtype: of the attention. kernel: a backend's name.
    device: where tensors are."""

    rank: int
    world_size: int
    group: str
    heads: int
    heads_kv: int
    dim: int
    dtype: torch.dtype
    kernel: str
    device: str = "cuda"

    @property
    def module(self) -> Any:
        return load(self.kernel)

    @property
    def params(self) -> Params:
        return Params(self.dim**-0.5)

    def draw(self, rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, self.dim, device=self.device).to(self.dtype)


class Method(Protocol):
    """One way to run a pack's attention."""

    name: str

    def forward(self) -> object: ...
    def backward(self) -> object: ...


def on_device(
    arrays: dict[str, np.ndarray[Any, Any]], tensors: tuple[PlanTensor, ...] = KERNEL_TABLES, device: str = "cuda"
) -> list[Tensor]:
    made = [(torch.from_numpy(arrays[tensor.name]), tensor.on_host) for tensor in tensors]
    return [x if on_host else x.to(device) for x, on_host in made]


def whole(pack: Pack) -> Schedule:
    """The pack on one GPU."""
    return plan_batch([pack.documents], 1, "contiguous", pack.mask).schedule(pack.mask)


def plan(pack: Pack, setup: Setup, layout: str = "balanced", exchange: str = "push") -> BatchPlan:
    """As a batch is planned behind the first step of a model whose attention has the setup's heads and runs by this
    exchange."""
    sharding = cp.Sharding(setup.world_size, {"doc_ids": 1}, cp.DocumentIds("doc_ids"), layout=cast(Any, layout))
    site = SiteKind(Model((setup.heads, setup.heads_kv), setup.dim), exchange)
    return plan_batch([pack.documents], setup.world_size, layout, pack.mask, sharding.layout_options(site))


class Alone:
    """The whole pack on one GPU: what "ideal" is a P-th of."""

    def __init__(self, pack: Pack, setup: Setup) -> None:
        self.name, self.setup = "one GPU", setup
        schedule = whole(pack)
        self.tables = Tables(*on_device(schedule.attention(0), device=setup.device))
        self.q, self.dout = (setup.draw(schedule.local_rows, setup.heads) for _ in range(2))
        # A key that two pieces read, as of a tree's prompt, is there twice.
        self.k, self.v = (setup.draw(int(schedule.expanded[0]), setup.heads_kv) for _ in range(2))

    def forward(self) -> object:
        self.out, self.lse = self.setup.module.forward(self.q, self.k, self.v, self.tables, self.setup.params)
        return self.out

    def backward(self) -> object:
        return self.setup.module.backward(
            self.dout, self.q, self.k, self.v, self.out, self.lse, self.tables, self.setup.params
        )


class Ours:
    """A layout and an exchange of this package, rows before and after the kernel. `alone` leaves the exchange out of
    the time: what the kernel takes. `planned`: what a compiled model got for the pack."""

    def __init__(
        self, pack: Pack, setup: Setup, layout: str, exchange: str, *, alone: bool = False,
        planned: BatchPlan | None = None,
    ) -> None:  # fmt: skip
        self.name = f"{layout} + {exchange}{', kernel alone' if alone else ''}"
        self.setup = setup
        schedule = (planned or plan(pack, setup, layout, exchange)).schedule(pack.mask)
        route = ROUTES[exchange]
        self.tables = Tables(*on_device(schedule.attention(setup.rank), device=setup.device))
        self.route = on_device(route.arrays(schedule, setup.rank), route.tensors, setup.device)
        self.exchange = Exchange(exchange, setup.group, setup.world_size)
        self.q, self.dout = (setup.draw(schedule.local_rows, setup.heads) for _ in range(2))
        self.k, self.v = (setup.draw(schedule.local_rows, setup.heads_kv) for _ in range(2))
        self.kv: Tensor | None = exchange_kv(self.k, self.v, self.route, self.exchange) if alone else None

    def _keys(self) -> tuple[Tensor, Tensor]:
        kv = exchange_kv(self.k, self.v, self.route, self.exchange) if self.kv is None else self.kv
        return split_kv(kv, self.setup.heads_kv, self.setup.dim, self.setup.dim)

    def forward(self) -> object:
        self.out, self.lse = self.setup.module.forward(self.q, *self._keys(), self.tables, self.setup.params)
        return self.out

    def backward(self) -> object:
        able = capabilities(self.setup.kernel).unrounded_gradients(self.q, self.setup.heads_kv)
        params = replace(self.setup.params, unrounded=able and self.exchange.kind != "push")
        dq, dk, dv = self.setup.module.backward(
            self.dout, self.q, *self._keys(), self.out, self.lse, self.tables, params
        )
        if self.kv is not None:
            return dq
        both = torch.cat((dk.flatten(1), dv.flatten(1)), 1) if dk._base is None else dk._base
        dk, dv = return_kv(both, self.k, self.v, self.route, self.exchange)
        return dq, dk.to(self.k.dtype), dv.to(self.v.dtype)


class Pushed(Ours):
    """Rows travel beside the kernel. `keep` keeps the expanded rows for the backward."""

    def __init__(
        self, pack: Pack, setup: Setup, layout: str, *, keep: bool = False, planned: BatchPlan | None = None
    ) -> None:
        if not capabilities(setup.kernel).overlaps_exchange:
            raise ValueError(f"{setup.kernel} does not run beside an exchange")
        super().__init__(pack, setup, layout, "push", planned=planned)
        self.name = f"{layout} + push, beside the kernel{', kept' if keep else ''}"
        self.keep = keep
        self.inputs = self.tables.cu_seqlens_q, self.tables.cu_seqlens_k, self.tables.pieces, self.tables.launches
        self.numbers = setup.params.scale, setup.params.softcap, setup.kernel, setup.params.deterministic

    def forward(self) -> object:
        out, lse, kv = _ops.pushed_attention.default(
            self.q, self.k, self.v, *self.inputs, self.route, *self.numbers, self.keep, self.setup.group, None
        )
        self.out, self.lse, self.kv = out, lse, kv if self.keep else None
        return self.out

    def backward(self) -> object:
        return _ops.pushed_attention_backward.default(
            self.dout, self.q, self.k, self.v, self.kv, self.out, self.lse, *self.inputs, self.route, *self.numbers,
            self.setup.group,
        )  # fmt: skip


class Noting(Backend):
    """The backend, which keeps how the one attention of its graph runs."""

    decision: Decision

    def _rewritten(self, gm: torch.fx.GraphModule) -> State:
        state = super()._rewritten(gm)
        if not state.refusals:
            (self.decision,) = state.decisions
        return state


class Layer:
    """A layer's attention as a user runs it: compiled by the backend in the first step, whose site later batches are
    planned for. Queries, keys and values are its inputs: no projection, no rotation."""

    def __init__(self, setup: Setup, kernel: str) -> None:
        """`kernel`: as `Sharding` takes it."""
        torch._dynamo.reset()
        torch._functorch.config.donated_buffer = False  # a forward's gradients are timed several times
        # Plans are for the site with most columns under a mesh: each shape has a mesh of its own.
        names = (f"cp_{setup.heads}_{setup.heads_kv}_{setup.dim}",)
        mesh = init_device_mesh(setup.device, (setup.world_size,), mesh_dim_names=names)
        tokens, packing = {"q": 1, "k": 1, "v": 1, "doc_ids": 1}, cp.DocumentIds("doc_ids")
        inner = "inductor" if setup.device == "cuda" else "aot_eager"
        self.setup = setup
        self.sharding = cp.Sharding(mesh, tokens, packing, kernel=cast(Any, kernel), inner=inner)
        self._made_by = Noting(self.sharding)
        self.run: Any = torch.compile(packed_attention, backend=self._made_by, fullgraph=True)

    @property
    def decision(self) -> Decision:
        """The exchange and the kernel, chosen in the first step."""
        return self._made_by.decision

    def on(self, pack: Pack) -> Compiled:
        """The layer on a pack, planned as a batch is behind the first step."""
        if not hasattr(self._made_by, "decision"):
            Compiled(pack, self).close()
        return Compiled(pack, self)


class Compiled:
    """A compiled layer in the block of a batch that `shard` cut, with gradients by autograd. `plan`: of the batch."""

    name = "compiled layer"

    def __init__(self, pack: Pack, layer: Layer) -> None:
        if not pack.mask.is_plain:
            raise ValueError("the layer's own mask is of documents alone")
        self.layer, self.block = layer, ExitStack()
        self.local: Any = self.block.enter_context(layer.sharding.shard(self._batch(pack), lengths=pack.lengths))
        self.plan: BatchPlan = self.local.plan
        for name in ("q", "k", "v"):
            self.local[name].requires_grad_()
        self.dout = torch.randn_like(self.local["q"])
        self.forward()
        self.backward()

    def _batch(self, pack: Pack) -> dict[str, Tensor]:
        """The whole row, the same on all ranks."""
        setup = self.layer.setup
        drawn, heads = torch.Generator(setup.device).manual_seed(0), (setup.heads, setup.heads_kv, setup.heads_kv)
        shapes = [(1, pack.tokens, count, setup.dim) for count in heads]
        rows = [torch.randn(x, device=setup.device, dtype=setup.dtype, generator=drawn) for x in shapes]
        batch = dict(zip(("q", "k", "v"), rows, strict=True))
        ids = np.repeat(np.arange(len(pack.lengths)), pack.lengths)
        return {**batch, "doc_ids": torch.from_numpy(ids)[None].to(setup.device)}

    def forward(self) -> object:
        self.out: Tensor = self.layer.run(**self.local)
        return self.out

    def backward(self) -> object:
        inputs = [self.local[name] for name in ("q", "k", "v")]
        return torch.autograd.grad(self.out, inputs, self.dout, retain_graph=True)

    def close(self) -> None:
        self.block.close()


def ops_of(compiled: Compiled, pack: Pack, *, alone: bool = False) -> Ours:
    """The ops that a compiled layer runs, called one after another, on its plan. `alone`: the kernel without exchange.

    Raises:
        ValueError: heads are scattered before, or rows travel in steps.
    """
    site, setup = compiled.layer.decision, compiled.layer.setup
    if site.heads is not None or site.exchange.kind not in CARRIERS:
        raise ValueError(f"{site.exchange_name} is no exchange before the kernel")
    setup = replace(setup, kernel=site.kernel)
    if travels_beside(site.exchange, site.kernel) and not alone:
        return Pushed(pack, setup, "balanced", planned=compiled.plan)
    return Ours(pack, setup, "balanced", site.exchange.kind, alone=alone, planned=compiled.plan)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor) -> Tensor:
    """(1, T, heads, D) of one process, as a model writes it."""
    mask = (doc_ids[:, None, :, None] == doc_ids[:, None, None, :]).tril()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


class Gathered:
    """All-gather written plainly: contiguous chunks of the row, all KV gathered, one launch over the slice that the
    rank's documents need, gradients reduce-scattered in the storage dtype."""

    def __init__(self, pack: Pack, setup: Setup) -> None:
        self.name, self.setup = "plain all-gather", setup
        rows = pack.tokens // setup.world_size
        start, stop = setup.rank * rows, (setup.rank + 1) * rows
        ends = np.cumsum(pack.lengths)
        begins = ends - np.array(pack.lengths)
        mine = np.flatnonzero((ends > start) & (begins < stop))
        q0, q1 = np.maximum(begins[mine], start) - start, np.minimum(ends[mine], stop) - start
        first = int(begins[mine[0]])
        k0, k1 = begins[mine] - first, np.minimum(ends[mine], stop) - first
        self.keys = slice(first, stop)
        full = np.stack([q0, q1, k0, k1, 0 * q0 - 1, 0 * q0, 0 * q0], 1).astype(np.int64)
        cu_q, cu_k = (torch.tensor([0, *x.tolist()], dtype=torch.int32, device="cuda") for x in (q1, k1))
        most = torch.tensor([[-1, 0, int((q1 - q0).max()), int((k1 - k0).max())]])
        self.tables = Tables(cu_q, cu_k, torch.from_numpy(full), most)
        self.q, self.dout = (setup.draw(rows, setup.heads) for _ in range(2))
        self.kv = setup.draw(rows, 2 * setup.heads_kv)
        self.all = self.kv.new_empty(pack.tokens, 2 * setup.heads_kv, setup.dim)
        self.grad = torch.empty_like(self.all)

    def _views(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        k, v = rows[self.keys].split(self.setup.heads_kv, 1)
        return k, v

    def forward(self) -> object:
        dist.all_gather_into_tensor(self.all, self.kv)
        self.out, self.lse = self.setup.module.forward(self.q, *self._views(self.all), self.tables, self.setup.params)
        return self.out

    def backward(self) -> object:
        dist.all_gather_into_tensor(self.all, self.kv)
        dq, dk, dv = self.setup.module.backward(
            self.dout, self.q, *self._views(self.all), self.out, self.lse, self.tables, self.setup.params
        )
        self.grad.zero_()
        for target, grad in zip(self._views(self.grad), (dk, dv), strict=True):
            target.copy_(grad)
        mine = torch.empty_like(self.kv)
        dist.reduce_scatter_tensor(mine, self.grad)
        return dq, mine


class Ulysses:
    """Heads for tokens by all-to-all, the whole row on H / P heads, and back. Keys are repeated when K < P."""

    def __init__(self, pack: Pack, setup: Setup) -> None:
        self.name, self.setup = "plain Ulysses", setup
        world_size = setup.world_size
        rows = pack.tokens // world_size
        schedule = whole(pack)
        self.tables = Tables(*on_device(schedule.attention(0)))
        self.q, self.dout = (setup.draw(rows, setup.heads) for _ in range(2))
        self.k, self.v = (setup.draw(rows, max(setup.heads_kv, world_size)) for _ in range(2))

    def _spread(self, x: Tensor) -> Tensor:
        """(T / P, H, D) -> (T, H / P, D)."""
        rows, heads, dim = x.shape
        send = x.view(rows, self.setup.world_size, heads // self.setup.world_size, dim).transpose(0, 1).contiguous()
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send)
        return received.flatten(0, 1)

    def _collect(self, x: Tensor) -> Tensor:
        """(T, H / P, D) -> (T / P, H, D)."""
        send = x.contiguous().unflatten(0, (self.setup.world_size, -1))
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send)
        return received.transpose(0, 1).flatten(1, 2)

    def forward(self) -> object:
        self.spread = tuple(self._spread(x) for x in (self.q, self.k, self.v))
        self.out, self.lse = self.setup.module.forward(*self.spread, self.tables, self.setup.params)
        return self._collect(self.out)

    def backward(self) -> object:
        grads = self.setup.module.backward(
            self._spread(self.dout), *self.spread, self.out, self.lse, self.tables, self.setup.params
        )
        return tuple(self._collect(grad) for grad in grads)
