"""Comparisons over all ranks of what must be equal on them, as graphs and batches: a difference raises on every rank
instead of hanging.

Texts are compared turn by turn (`compare`) through the group's store: from host to host, with no collective, and
nothing waits for a GPU. Turns of all kinds (`graph`, `batch`, …) are counted together: a rank that skips one comes to
the next with another kind than the others, and all raise. So they do where ranks did not do the same since the turn
before (`heartbeat.py`).

    …/7/hash/0, 1, …     of each rank's text of turn 7 kind and digest, what it did since turn 6, a note: read by all
    …/7/text/0, 1, …     the texts themselves, only if digests differ

A rank that is not there for `PATIENCE_S` is named on stderr, with the line that it is at.

`on_graph`, `on_batch` and the like say what is compared. A tensor's text is its dtype, its shape and the hash of a
sample (`fingerprint`).
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib.metadata
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import store_of, timeout_of

from . import heartbeat
from .heartbeat import CALLS, OTHER_CALL

PATIENCE_S = 20.0
_ADVICE = {
    "graph": "compiled another graph than rank 0, so collectives would not match. Give every rank the same model, "
    "annotation and batch shapes, and the same versions of packages",
    "batch": "cut another batch than rank 0, so rows would go to the wrong places. Give every rank of the group the "
    "same batch, layout and lengths",
    "masks": "found no mask among the batch's arguments. Give every rank of the group the same batch",
    "weights": "have other weights or buffers than rank 0, so the model is not the one of a single process. Give every "
    "rank the same seed or checkpoint, those of other data-parallel groups too; and whole weights, not parts of them "
    "as under tensor parallelism",
    "experts": "share experts over another number of ranks than rank 0. Give every rank the same experts=, and under "
    "'auto' the same speeds and ranks_per_node",
    "arguments": "call the model with other arguments than rank 0, and what tokens does not name is taken to be the "
    "same on all ranks. Compute it of the whole batch, before `shard`; or give it a value per token, and name it in "
    "tokens",
    "gradients": "have gradients of other parameters than rank 0, so sums would mix them up. Give every parameter a "
    "gradient on all ranks, or on none",
}
_ORDER = (
    "compiled a graph of the same operations as rank 0 in another order, so compilers may order collectives otherwise. "
    "Each process walks a Python set in an order of its own: set PYTHONHASHSEED=0 for all ranks, or keep a list"
)
_FAILED = "failed"


def talks(sharding: Sharding) -> bool:
    """True if the annotation has other ranks, in processes of their own."""
    if sharding.world_size == 1 or isinstance(sharding.mesh, int):
        return False
    return dist.get_backend(sharding.group) != "fake"  # a group of one process that plays many


def fail(sharding: Sharding, kind: str, text: str) -> None:
    """Take this rank's next turn with an error's text instead of one of this kind: the others raise it. Where the store
    is gone there is no one to tell, and the error itself is what the user must see."""
    prefix, store = _next_turn(sharding, kind)[0], store_of(sharding.group)
    with suppress(dist.DistError):
        store.set(f"{prefix}/text/{sharding.rank}", text)
        store.set(f"{prefix}/hash/{sharding.rank}", f"{_FAILED}  ")


def _next_turn(sharding: Sharding, kind: str) -> tuple[str, str]:
    """Prefix of the keys of this rank's next turn, and of the one before."""
    turn = heartbeat.take_turn(sharding.group_name, kind)
    return f"cp_rewrite/{turn}", f"cp_rewrite/{turn - 1}"


def compare(sharding: Sharding, kind: str, text: str, note: str = "") -> list[str]:
    """Raise unless all ranks come with this kind and this text, having done the same before. Returns the notes that
    they bring beside it."""
    try:
        return _compared(sharding, kind, text, note)
    except dist.DistError as error:
        why = heartbeat.reason(sharding)
        raise RuntimeError(f"cp_rewrite: {why}; rank {sharding.rank}, which {CALLS[kind]}, can't reach it") from error


def _compared(sharding: Sharding, kind: str, text: str, note: str) -> list[str]:
    rank, store = sharding.rank, store_of(sharding.group)
    prefix, before = _next_turn(sharding, kind)
    # A text that all ranks turn out to share is never read: it is written only when digests differ.
    mine = f"{kind} {hashlib.sha256(text.encode()).hexdigest()}"
    did = heartbeat.ended(sharding.group_name) if sharding.check_batches else ""
    store.set(f"{prefix}/hash/{rank}", f"{mine} {did} {note}")
    values = _read(sharding, [f"{prefix}/hash/{r}" for r in range(sharding.world_size)], kind)
    found, histories, notes = zip(*(value.rsplit(" ", 2) for value in values), strict=True)
    same = found.count(mine) == len(found)
    if not same:
        store.set(f"{prefix}/text/{rank}", text)
    if _FAILED in found:
        failed = found.index(_FAILED)
        theirs = _read(sharding, [f"{prefix}/text/{failed}"], kind)[0]
        raise RuntimeError(f"cp_rewrite: rank {failed} of the group brought {theirs}")
    if parted := heartbeat.difference(dict(enumerate(histories))):
        raise RuntimeError(f"cp_rewrite: the group's ranks are not in step: {parted}")
    if same:
        # All have written this turn, so all have read the one before.
        store.delete_key(f"{before}/hash/{rank}")
        return list(notes)
    raise RuntimeError(f"cp_rewrite: {_unlike(sharding, prefix, kind, text, found)}")


def _unlike(sharding: Sharding, prefix: str, kind: str, text: str, found: Sequence[str]) -> str:
    """The error where ranks come with other kinds, or other texts, by what they wrote of them."""
    kinds = [value.partition(" ")[0] for value in found]
    if len(set(kinds)) > 1:
        return _out_of_step(kinds)
    rank = sharding.rank
    different = [other for other, value in enumerate(found) if value != found[0]]
    other = 0 if rank in different else different[0]
    theirs = _read(sharding, [f"{prefix}/text/{other}"], kind)[0]
    lines = difflib.unified_diff(
        text.splitlines(), theirs.splitlines(), f"rank {rank}", f"rank {other}", n=0, lineterm=""
    )
    advice = _ORDER if kind == "graph" and _without_order(text) == _without_order(theirs) else _ADVICE[kind]
    return f"ranks {different} of the group {advice}. First differences:\n" + "\n".join(
        line[:400] for line in list(lines)[:12]
    )


def _out_of_step(kinds: Sequence[str]) -> str:
    """The error where ranks come with different kinds."""
    ranks = {kind: [rank for rank, other in enumerate(kinds) if other == kind] for kind in dict.fromkeys(kinds)}
    does = [f"rank {', '.join(map(str, which))} {CALLS[kind]}" for kind, which in ranks.items()]
    anew = f" Where one compiles anew, {OTHER_CALL}." if "graph" in kinds else ""
    skipped = " cp.sum_gradients is for all ranks or for none: skip a step by what is equal on all of them."
    return (
        f"the group's ranks are not in step: {'; '.join(does)}. Every rank must shard the same batches, "
        f"with the same check_batches, and call the same models the same number of times."
        + skipped * ("gradients" in kinds)
        + anew
    )


def _without_order(text: str) -> list[str]:
    """The lines of a graph, in an order of their own: each node is called by what it is made of."""
    made_of: dict[str, str] = {}
    lines: list[str] = []
    for line in text.splitlines():
        head, _, body = line.partition(" = ")
        name, _, kind = head.strip().partition(":")
        body = re.sub(r"\b[A-Za-z_]\w*\b(?!\()", lambda match: made_of.get(match[0], match[0]), body)
        lines.append(re.sub(r"\bS\d+\b", "S", f"{kind} = {body}"))
        if body not in ("placeholder", "get_attr"):
            made_of[name] = hashlib.sha256(lines[-1].encode()).hexdigest()[:16]
    return sorted(lines)


def _read(sharding: Sharding, keys: list[str], kind: str) -> list[str]:
    """Texts under the keys, each of which ends with the rank that writes it; waits for them."""
    store, start = store_of(sharding.group), time.monotonic()
    # A client that waits inside of the store prints warnings after a while.
    while not store.check(keys) and (waited := time.monotonic() - start) < heartbeat.PERIOD_S:
        time.sleep(min(waited / 16, 0.05))
    _wait_on(sharding, keys, kind, start)
    return [value.decode() for value in (store.multi_get(keys) if store.has_extended_api() else map(store.get, keys))]


def _wait_on(sharding: Sharding, keys: list[str], kind: str, start: float) -> None:
    """Wait for ranks that are late: say which, and where they are; raise where they ended, did not do the same as this
    rank, or at the group's timeout."""
    store, group, told, met = store_of(sharding.group), sharding.group_name, False, time.monotonic()
    while missing := [int(key.rsplit("/", 1)[1]) for key in keys if not store.check([key])]:
        now = time.monotonic()
        gone = heartbeat.gone(sharding)
        ends = {r: heartbeat.end_of(sharding, store, r) or ("died" if r in gone else "") for r in missing}
        ended = [f"rank {r} {how}" for r, how in ends.items() if how]
        if ended or now > start + timeout_of(sharding.group).total_seconds():
            raise RuntimeError(_absent(missing, ended, kind))
        apart = [how for r in missing if (how := heartbeat.apart(store, group, sharding.rank, r))]
        met = met if apart else now
        if now > met + 2 * heartbeat.PERIOD_S:  # two beats said so
            raise RuntimeError(f"cp_rewrite: the group's ranks are not in step: {'; '.join(apart)}")
        if not told and now > start + PATIENCE_S:
            told = True
            where = [f"rank {r}{heartbeat.place_of(store, r)}" for r in missing]
            print(
                f"cp_rewrite: rank {sharding.rank}, which {CALLS[kind]}, has waited {PATIENCE_S:.0f} s for "
                f"{', '.join(where)}: it may be compiling; or a rank skipped a call, a backward or cp.sum_gradients",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        time.sleep(0.1)


def _absent(missing: Sequence[int], ended: Sequence[str], kind: str) -> str:
    """The error where ranks don't come."""
    why = f" ({'; '.join(ended)})" if ended else " within the group's timeout"
    return (
        f"cp_rewrite: rank {', '.join(map(str, missing))} of the group brought no {kind}{why}; every rank must shard "
        "the same batches, with the same check_batches, and call the model the same number of times"
    )


_WHOLE = (Tensor, nn.Parameter, nn.Buffer)
_PACKAGES = ("triton", "flash-attn-4", "flash-attn", "flash-linear-attention", "flash-qla", "transformers")
SAMPLE = 1024
"""Values that are compared of each tensor, evenly spread: another batch differs almost everywhere."""


def on_graph(sharding: Sharding, text: str) -> int:
    """Compare `text` (a normalised graph, a refusal), versions, the annotation and the grad mode over the group.

    Returns: a number for this graph, the same on all ranks.
    Raises:
        RuntimeError: on every rank, naming the ranks that differ and the first lines that do, or the ranks that did not
            come within the group's timeout.
    """
    if talks(sharding):
        options = [f"{name}: {value!r}" for name, value in sharding.graph_options.items()]
        compare(sharding, "graph", "\n".join([*_versions(), f"grad mode: {torch.is_grad_enabled()}", *options, text]))
        return heartbeat.turns(sharding.group_name)
    return 0


@functools.cache
def _versions() -> list[str]:
    """A line for each thing that makes a graph and runs it."""
    installed = [f"{name}: {found}" for name in _PACKAGES if (found := version_of(name)) is not None]
    return [
        f"torch: {torch.__version__}",
        f"cp_rewrite: {getattr(sys.modules['cp_rewrite'], '__version__', '')}",
        *installed,
    ]


def version_of(package: str) -> str | None:
    """The version of an installed package; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def on_batch(sharding: Sharding, plan: BatchPlan, batch: Mapping[str, Any], note: str = "") -> list[str]:
    """Compare who owns which tokens of a batch, its documents, and a sample of its values that are on the host.

    It costs four round trips to the store, beside kernels of earlier batches that still run: 0.5 ms for 2 processes and
    0.7 ms for 4 on 2 CPU cores over TCP (`examples/bench/agree.py`), and 0.02 ms per tensor on the host, of which a
    sample is hashed. A file store polls every 10 ms.

    Returns: the notes of all ranks, which need not be equal. Raises as `on_graph`; `check_batches` may be off.
    """
    if not sharding.check_batches or not talks(sharding):
        return []
    return compare(sharding, "batch", describe(sharding, plan, batch), note)


def on_masks(sharding: Sharding) -> None:
    """Where `check_batches` is off: wait until every rank has compared its masks. Raises as `on_graph`, and what a rank
    found that told it by `on_failure`."""
    if not sharding.check_batches and talks(sharding):
        compare(sharding, "masks", "")


def on_gradients(sharding: Sharding, shapes: Sequence[str]) -> None:
    """Compare which parameters have a gradient, one text each. Raises as `on_graph`; `check_batches` may be off."""
    if sharding.check_batches and talks(sharding):
        compare(sharding, "gradients", "\n".join(shapes))


def on_weights(sharding: Sharding, weights: Mapping[str, Tensor], mesh: DeviceMesh | None = None) -> None:
    """Compare a sample of a model's weights and buffers over the group, or over all ranks of `mesh`, of one dim.
    Raises as `on_graph`."""
    if mesh is not None:
        sharding = _over(mesh, sharding)
    if talks(sharding):
        whole = whole_weights(weights)
        prints = _fingerprints(list(whole.values()))
        compare(sharding, "weights", "\n".join(map(": ".join, zip(whole, prints, strict=True))))


def on_experts(sharding: Sharding, shared: int, mesh: DeviceMesh) -> None:
    """Compare how many ranks are to share a set of experts, over all ranks of `mesh`, of one dim. Raises as
    `on_graph`."""
    if talks(over := _over(mesh, sharding)):
        compare(over, "experts", f"experts: {shared}")


def _over(mesh: DeviceMesh, sharding: Sharding) -> Sharding:
    """An annotation over other ranks, to compare what is no batch."""
    return Sharding(mesh, sharding.tokens, sharding.packing, check_batches=sharding.check_batches)


def on_arguments(sharding: Sharding, values: Mapping[str, Any]) -> None:
    """Compare a sample of what a model is called with beside tokens. Raises as `on_graph`."""
    if talks(sharding):
        plain = {
            name: value for name, value in values.items() if type(value) is Tensor and value.layout == torch.strided
        }
        prints = dict(zip(plain, _fingerprints(list(plain.values())), strict=True)) if plain else {}
        others = {name: fingerprint(value) for name, value in values.items() if name not in plain}
        compare(sharding, "arguments", "\n".join(f"{name}: {text}" for name, text in (prints | others).items()))


def whole_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights that all ranks must have alike, by name. Left out are parts of a weight, as of DTensors, which differ
    between ranks by right, and tensors on the meta device and stand-ins of `parallelize`, which hold nothing."""
    whole = {n: x for n, x in weights.items() if type(x) in _WHOLE and x.layout == torch.strided}
    return {n: x for n, x in whole.items() if not x.is_meta and x.untyped_storage().nbytes()}


def on_failure(sharding: Sharding, kind: str, error: Exception) -> None:
    """Tell the others that this rank has no `kind`; they raise with its error instead of waiting for it."""
    if (sharding.check_batches or kind != "batch") and talks(sharding):
        fail(sharding, kind, f"no {kind}: {type(error).__name__}: {error}")


def describe(sharding: Sharding, plan: BatchPlan, batch: Mapping[str, Any]) -> str:
    """Facts of a batch that must be equal on all ranks, a line each."""
    orders = hashlib.sha256(b"".join(part.tobytes() for order in plan.orders for part in order.intervals)).hexdigest()
    lines = [
        f"layout: {sharding.layout}",
        f"rows: {len(plan.rows)}",
        f"tokens: {plan.rows[0].total}",
        f"token order: {orders[:16]}",
        f"rows per rank: {plan.local_size}",
    ]
    for b, row in enumerate(plan.rows):
        lines += [f"row {b} document starts: {row.starts.tolist()}", f"row {b} lengths: {row.lengths.tolist()}"]
    return "\n".join(lines + [f"{name}: {fingerprint(value)}" for name, value in batch.items()])


def fingerprint(value: Any) -> str:
    """A plain value itself; of a tensor dtype and shape, and a hash of a sample if it is on the host; else the type."""
    if isinstance(value, bool | int | float | str):
        return repr(value)
    if type(value) is not Tensor:
        return type(value).__name__
    on_host = value.device.type == "cpu" and value.layout == torch.strided
    return _fingerprints([value])[0] if on_host else f"{value.dtype} {tuple(value.shape)}"


def _fingerprints(tensors: Sequence[Tensor]) -> list[str]:
    """Dtype, shape and a hash of a sample of each tensor; all samples come to the host in one copy for each device."""
    samples = [_sample(x) for x in tensors]
    hashes: dict[int, str] = {}
    for device in dict.fromkeys(sample.device for sample in samples):
        places = [i for i, sample in enumerate(samples) if sample.device == device]
        parts = torch.cat([samples[i] for i in places]).cpu().split([samples[i].numel() for i in places])
        hashes |= {
            i: hashlib.sha256(part.numpy().tobytes()).hexdigest()[:16] for i, part in zip(places, parts, strict=True)
        }
    return [f"{x.dtype} {tuple(x.shape)}, values {hashes[i]}" for i, x in enumerate(tensors)]


def _sample(x: Tensor) -> Tensor:
    """Up to about `SAMPLE` values, evenly spread, as bytes."""
    flat = x.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].contiguous().view(torch.uint8)
