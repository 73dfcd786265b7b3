"""All ranks must hold the same graph and the same batch: a difference raises on every rank instead of hanging.

How they are compared: `ranks/turns.py`. A batch costs four round trips to the store, beside kernels of earlier batches
that still run: 0.5 ms for 2 processes and 0.7 ms for 4 on 2 CPU cores over TCP (`examples/bench/agree.py`), and 0.02 ms
per tensor on the host, of which a sample is hashed. A file store polls every 10 ms.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cp_rewrite.planning.batch_plan import BatchPlan
from cp_rewrite.sharding import Sharding

from .ranks import history, turns

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
    if turns.talks(sharding):
        options = [f"{name}: {value!r}" for name, value in sharding.graph_options.items()]
        turns.compare(
            sharding, "graph", "\n".join([*_versions(), f"grad mode: {torch.is_grad_enabled()}", *options, text])
        )
        return history.turns(sharding.group_name)
    return 0


@functools.cache
def _versions() -> list[str]:
    """Of what makes a graph and runs it, a line each."""
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

    Returns: the notes of all ranks, which need not be equal. Raises as `on_graph`; `check_batches` may be off.
    """
    if not sharding.check_batches or not turns.talks(sharding):
        return []
    return turns.compare(sharding, "batch", describe(sharding, plan, batch), note)


def on_masks(sharding: Sharding) -> None:
    """Where `check_batches` is off: wait until every rank has compared its masks. Raises as `on_graph`, and what a rank
    found that told it by `on_failure`."""
    if not sharding.check_batches and turns.talks(sharding):
        turns.compare(sharding, "masks", "")


def on_gradients(sharding: Sharding, shapes: Sequence[str]) -> None:
    """Compare which parameters have a gradient, one text each. Raises as `on_graph`; `check_batches` may be off."""
    if sharding.check_batches and turns.talks(sharding):
        turns.compare(sharding, "gradients", "\n".join(shapes))


def on_weights(sharding: Sharding, weights: Mapping[str, Tensor], mesh: DeviceMesh | None = None) -> None:
    """Compare a sample of a model's weights and buffers over the group, or over all ranks of `mesh`, of one dim.
    Raises as `on_graph`."""
    if mesh is not None:
        sharding = Sharding(mesh, sharding.tokens, sharding.packing, check_batches=sharding.check_batches)
    if turns.talks(sharding):
        whole = whole_weights(weights)
        prints = _fingerprints(list(whole.values()))
        turns.compare(sharding, "weights", "\n".join(map(": ".join, zip(whole, prints, strict=True))))


def on_arguments(sharding: Sharding, values: Mapping[str, Any]) -> None:
    """Compare a sample of what a model is called with beside tokens. Raises as `on_graph`."""
    if turns.talks(sharding):
        plain = {
            name: value for name, value in values.items() if type(value) is Tensor and value.layout == torch.strided
        }
        prints = dict(zip(plain, _fingerprints(list(plain.values())), strict=True)) if plain else {}
        others = {name: fingerprint(value) for name, value in values.items() if name not in plain}
        turns.compare(sharding, "arguments", "\n".join(f"{name}: {text}" for name, text in (prints | others).items()))


def whole_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that all ranks must have alike. Parts of a weight, as of DTensors, differ between ranks by right; tensors
    on the meta device, and the stand-ins of `parallelize`, hold nothing."""
    whole = {n: x for n, x in weights.items() if type(x) in _WHOLE and x.layout == torch.strided}
    return {n: x for n, x in whole.items() if not x.is_meta and x.untyped_storage().nbytes()}


def on_failure(sharding: Sharding, kind: str, error: Exception) -> None:
    """Tell the others that this rank has no `kind`; they raise with its error instead of waiting for it."""
    if (sharding.check_batches or kind != "batch") and turns.talks(sharding):
        turns.fail(sharding, kind, f"no {kind}: {type(error).__name__}: {error}")


def describe(sharding: Sharding, plan: BatchPlan, batch: Mapping[str, Any]) -> str:
    """What must be equal on all ranks of a batch, a line a fact."""
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
