"""What a chunk of tokens makes of the state that enters it, and how states pass through chains of such maps.

S_out = move · S_in + add. `move` is a matrix of each head, or numbers that broadcast with the state.

Shapes: C chunks, L levels, n chains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Maps:
    """Of C chunks or pieces.

    Args:
        move: (C, H, K, K) with `dense`; else broadcasts with `add`.
        add: (C, *state).
    """

    move: Tensor
    add: Tensor
    dense: bool

    def take(self, index: Tensor) -> Maps:
        """Those at `index`."""
        return Maps(self.move.index_select(0, index), self.add.index_select(0, index), self.dense)

    def zeros(self, count: int) -> Tensor:
        """(count, *state)."""
        return self.add.new_zeros(count, *self.add.shape[1:])


Read = Callable[[Tensor], Tensor]
"""States before each chunk (C, *state) -> results (C, CHUNK, …)."""


def run_chains(maps: Maps, levels: Sequence[int], start: Tensor) -> tuple[Tensor, Tensor]:
    """(C, *state) before each map and (n, *state) at the end of each chain, from (n, *state) at the starts.

    Args:
        maps: level-major, `levels` of each level: see `planning/token_reads/chunks.py`.
    """
    state, at = start, 0
    before: list[Tensor] = []
    ends: list[Tensor] = []
    for count in (count for count in levels if count):
        ends.append(state[count:])
        state = state[:count]
        before.append(state)
        move, add = maps.move[at : at + count], maps.add[at : at + count]
        state = (move @ state if maps.dense else move * state) + add
        at += count
    ends.append(state)
    return torch.cat(before) if before else start[:0], torch.cat(ends[::-1])


def compose(maps: Maps, levels: Sequence[int]) -> Maps:
    """(n) maps, each of all steps of a chain in turn."""
    chains = levels[0]
    _, add = run_chains(maps, levels, maps.zeros(chains))
    shape = maps.move.shape[1:]
    one = torch.eye(shape[-1], dtype=add.dtype, device=add.device) if maps.dense else add.new_ones(shape)
    moves = Maps(maps.move, maps.move.new_zeros(1).expand_as(maps.move), maps.dense)
    _, move = run_chains(moves, levels, one.expand(chains, *shape))
    return Maps(move, add, maps.dense)
