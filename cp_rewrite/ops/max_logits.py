"""The largest attention logit of each head: noted by attention's ops on batches that are watched, asked for by users.

An op of attention that has a site's name calls `note` with the queries and keys that its kernel has read, whatever way
these came. No graph shows it, so a graph is the same on all batches; a block that is computed again notes the same.

Shapes: H query heads of the model, h of them on this rank (as many, unless heads are scattered), D head dim.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Generator, Hashable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_rewrite.kernels import reference
from cp_rewrite.kernels.cuda import nvtx
from cp_rewrite.kernels.select import Params, Tables
from cp_rewrite.planning.routes.head_deal import HeadDeal
from cp_rewrite.sharding import Sharding, require_sharding

from .scatter_heads import deal_queries


@dataclass(eq=False)
class _Record:
    """Largest logits of an annotation's batches on this rank. largest: by name of a site, (h,). batches: cut so far."""

    largest: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    batches: int = 0


_records: dict[Hashable, _Record] = {}
"""By what compiled graphs depend on."""
_current: ContextVar[_Record | None] = ContextVar("cp_rewrite_max_logits", default=None)
"""Largest logits of the batch in flight, where it is watched."""
_DEALT = "|"


@contextmanager
def watch_batch(sharding: Sharding) -> Generator[None]:
    """Note what attention does inside, if this batch of the annotation's is to be watched."""
    record = None
    if sharding.max_logits and not _is_dry(sharding):
        known = _records.setdefault(sharding.graph_key, _Record())
        record = known if known.batches % sharding.max_logits == 0 else None
        known.batches += 1
    token = _current.set(record)
    try:
        yield
    finally:
        _current.reset(token)


def _is_dry(sharding: Sharding) -> bool:
    return isinstance(sharding.mesh, int) and sharding.mesh > 1


def note(site: str, q: Tensor, k: Tensor, tables: Tables, params: Params, parts: Any = None) -> None:
    """Called by attention's ops. site: "" is not watched. q (R, h, D), k (E, hkv, D), tables: what the kernel has read;
    parts: of `flash.overlap`, where it ran in two."""
    record = _current.get()
    if record is None or not site:
        return
    # What is kept outlives an inference mode.
    with nvtx("max_logits"), torch.inference_mode(False), torch.no_grad():
        by_kernel = _kernel() if q.is_cuda else None
        if by_kernel is not None and q.dtype in by_kernel.DTYPES:
            found = by_kernel.max_logits(q, k, tables, params, parts)
        else:
            found = reference.max_logits(q, k, tables, params)
        known = record.largest.setdefault(site, found)
        if known.shape != found.shape:
            raise ValueError(f"two models with a {site!r} run under one annotation with max_logits: give each its own")
        torch.maximum(known, found, out=known)


def note_site(site: str, q: Tensor) -> None:
    """Called by an op that may have nothing to note on some rank: every rank asks for the same sites. q (R, h, D)."""
    record = _current.get()
    if record is not None and site:
        with torch.inference_mode(False):
            none = q.new_full((q.shape[1],), -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        record.largest.setdefault(site, none)


@cache
def _kernel() -> Any:
    """`kernels.max_logits`; None without triton."""
    there = importlib.util.find_spec("triton") is not None
    return importlib.import_module("cp_rewrite.kernels.max_logits") if there else None


def scattered(site: str, deal: HeadDeal) -> str:
    """A site's name where heads are scattered: what is noted is of the heads that this rank was dealt."""
    return f"{site}{_DEALT}{deal.heads}/{deal.heads_kv}/{deal.ranks}" if site else ""


@torch.no_grad()
def max_logits(sharding: Sharding) -> dict[str, Tensor]:
    """The largest logit of each head, by attention site, over all batches that were watched since the last call.

    A logit is taken after scale and soft cap, over the pairs of tokens that the mask shows; sinks are none. All ranks
    of the group call it together, and get the same numbers; the host does not wait for the GPU. With data parallelism
    the largest of all groups is an `all_reduce` of yours.

    Args:
        sharding: the annotation, with `max_logits`.
    Returns:
        module of the model (`layers.0.attn`; of several sites in one module the second is `layers.0.attn#2`) -> (H,)
        fp32 (fp64 of fp64 models) on the mesh's device; -inf for a head without a pair. Empty where no batch was
        watched.
    Raises:
        ValueError: the annotation does not ask for them, or is a dry run's.
    """
    if not require_sharding(sharding).max_logits:
        raise ValueError("max_logits was given a Sharding that does not note them: Sharding(max_logits=True, …)")
    group = sharding.group if _is_dry(sharding) or sharding.world_size > 1 else None
    record = _records.get(sharding.graph_key)
    if record is None or not record.largest:
        return {}
    found: dict[str, Tensor] = {}
    for key in sorted(record.largest):
        own = record.largest[key]
        name, largest = _of_all_heads(key, own, sharding)
        found[name] = torch.maximum(found[name], largest) if name in found else largest
        if sharding.capacity is None:
            del record.largest[key]
        else:
            own.fill_(-torch.inf)  # a captured step writes to it
    flat = torch.cat(list(found.values()))
    if group is not None:
        dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
    parts = flat.split([x.numel() for x in found.values()])
    return {name: part.to(found[name].dtype) for name, part in zip(found, parts, strict=True)}


def _of_all_heads(key: str, own: Tensor, sharding: Sharding) -> tuple[str, Tensor]:
    """(the site's name, (H,)): -inf for heads of other ranks."""
    name, _, dealt = key.partition(_DEALT)
    if not dealt:
        return name, own.clone()
    deal = HeadDeal.best(*map(int, dealt.split("/")))
    place = sharding.rank if deal.ranks == sharding.world_size else sharding.mesh.get_local_rank(1)  # type: ignore[union-attr]
    numbers = torch.arange(1, deal.heads + 1, device=own.device)[None, :, None]  # padded with 0
    mine = deal_queries(numbers, deal).view(deal.ranks, -1)[place]
    return name, own.new_full((deal.heads + 1,), -torch.inf).index_copy_(0, mine, own)[1:]
