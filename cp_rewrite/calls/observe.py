"""What a compile and a run show of themselves: counters, trace artifacts, NVTX ranges; and what compile caches key on.

TORCH_LOGS="+cp_rewrite"                    each pass with its time and op-count difference (DEBUG)
torch._dynamo.utils.counters["cp_rewrite"]  graphs, sites, refusals by reason, exchanges, segments
TORCH_TRACE=folder                          tlparse shows the artifacts cp_rewrite_before, _after, _refused
nsys profile -t nvtx,cuda                   ranges cp_rewrite::exchange, ::attention, forward and backward
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._logging import trace_structured

from cp_rewrite.passes.values.state import State
from cp_rewrite.sharding import Sharding


def count(state: State) -> None:
    """Add one graph to `counters["cp_rewrite"]`."""
    mine = counters["cp_rewrite"]
    if state.refusals:
        mine["graphs refused"] += 1
        for refusal in state.refusals:
            mine[f"refused {refusal.reason.name}"] += 1
        return
    mine["graphs rewritten"] += 1
    mine["sites"] += len(state.decisions)
    for decision in state.decisions:
        mine[f"exchange {decision.exchange_name}"] += 1
        mine[f"kernel {decision.kernel}"] += 1


def count_segments(segments: int, compiled: int) -> None:
    """Add the segments that a graph is cut into for FSDP, and how many of them are compiled."""
    counters["cp_rewrite"]["segments"] += segments
    counters["cp_rewrite"]["segments compiled"] += compiled


def trace(name: str, lines: Callable[[], Sequence[str]]) -> None:
    """Hand an artifact to tlparse; `lines` is called only when someone listens."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"cp_rewrite_{name}", "encoding": "string"},
        payload_fn=lambda: "\n".join(lines()),
        expect_trace_id=False,
    )


@functools.cache
def source_hash() -> str:
    """Digest of this package's sources.

    Compile caches key on the rewritten graph. They do not see what our ops do in their backward: after a change of it
    they would hand out old gradients.
    """
    digest = hashlib.sha256()
    root = Path(__file__).parent.parent
    # `passes` and `csrc` are links in a checkout, which `rglob` from their parent would not follow.
    files = [file for folder in (root, root / "passes", root / "csrc") for file in folder.rglob("*")]
    for file in sorted({file for file in files if file.suffix in (".py", ".cu", ".cuh")}):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def cache_key(sharding: Sharding) -> Generator[None]:
    """Compile caches filled inside hold for these sources and this annotation only."""
    config: Any = torch.compiler.config
    annotation = f"{sharding.world_size} {sharding.graph_key[1:]}"  # all but the mesh, whose ranks differ
    tag = hashlib.sha256(f"{source_hash()} {annotation}".encode()).hexdigest()[:16]
    with config.patch(cache_key_tag=f"{config.cache_key_tag}|cp_rewrite:{tag}"):
        yield
