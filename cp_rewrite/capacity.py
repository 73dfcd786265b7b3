"""Plan tensors of fixed sizes at fixed addresses, so that a CUDA graph of a whole step replays on other documents.

    sharding = cp.Sharding(..., capacity=cp.Capacity(documents=256, pieces=128, rows=40_000))
    for batch in warm_up:                        # compiles, makes every buffer
        with sharding.shard(batch) as local:
            step(local)
    with sharding.shard(batch) as local, torch.cuda.graph(graph):
        step(local)
    for batch in batches:                        # refills the buffers that the graph reads
        with sharding.shard(batch):
            graph.replay()

The buffers live as long as the annotation: keep it as long as the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from .arguments import whole_number


@dataclass(frozen=True)
class Capacity:
    """The most that a batch may need. Tables of a batch that needs less are filled up with empty entries.

    Args:
        documents: documents of a row of the batch: `cu_seqlens` arguments are filled up to documents + 1 entries.
        pieces: entries of a rank's kernel: its pieces, and the runs of local rows between them that are in none.
        rows: expanded rows of a rank: keys of all its pieces, one piece after another.
    Raises:
        TypeError, ValueError: a number that is no int of at least 2.
    """

    documents: int
    pieces: int
    rows: int

    def __post_init__(self) -> None:
        for f in fields(self):
            whole_number(f"capacity.{f.name}", getattr(self, f.name), 2)
