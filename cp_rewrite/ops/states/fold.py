"""States that enter the cut pieces of a rank: summaries of other pieces, exchanged and folded in the order of their
sequence.

Shapes: N, S, V, F as in `planning/token_reads/states.py`, which draws the tables.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from cp_rewrite.ops.exchanges.needed import all_to_all_rows

from .maps import Maps, run_chains


def fold(own: Maps, t: SimpleNamespace, way: str, group: str) -> Tensor:
    """(N, *state) what enters each cut piece, from in front (`way` "") or from behind ("_back").

    Args:
        own: (N) maps of this rank's cut pieces.
    """
    known = own
    send_rows, order, levels, place = (
        getattr(t, name + way) for name in ("send_summaries", "fold_order", "fold_levels", "fold_place")
    )
    if group:
        send, recv = getattr(t, "splits" + way).tolist()
        packed = torch.cat([own.move.flatten(1), own.add.flatten(1)], 1)
        received = all_to_all_rows(packed.index_select(0, send_rows[: sum(send)]), recv, send, group)
        move, add = received.split([own.move[0].numel(), own.add[0].numel()], 1)
        known = Maps(
            torch.cat([own.move, move.unflatten(1, own.move.shape[1:])]),
            torch.cat([own.add, add.unflatten(1, own.add.shape[1:])]),
            own.dense,
        )
    counts = levels.tolist()
    before, ends = run_chains(known.take(order), counts, known.zeros(counts[0]))
    found = torch.cat([known.zeros(1), before, ends])
    return found.index_select(0, place + 1)
