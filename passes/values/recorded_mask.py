"""A mask's computation as a value that outlives its graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from cp_rewrite.masks import PackedMask
from cp_rewrite.passes.graph.canonicalize import Canonical, Ref
from cp_rewrite.passes.graph.tokens import Size


@dataclass(frozen=True, eq=False)
class RecordedTensor:
    """A tensor's computation, and where the values come from that it starts with.

    Args:
        canonical: the computation as ATen calls.
        names: leaves that are arguments -> their names.
        places: leaves that are inputs of the graph -> their place among the inputs.
        values: leaves that are tensors held by the graph, or known numbers.
    """

    canonical: Canonical
    names: Mapping[Ref, str]
    places: Mapping[Ref, int]
    values: Mapping[Ref, Tensor]


@dataclass(frozen=True, eq=False)
class RecordedMask:
    """A mask as the model computes it, and what the rewrite takes it for.

    Args:
        tensor: its computation.
        mask: its meaning, proven or assumed.
        assumed: it is the user's word.
        where: the attention node's source line.
        tokens, rows: of each input, how many tokens of a row and rows of the batch a rank has. Each is asked when it is
            read: what was compiled since may have fixed it.
        indices: leaves that stand for b, h, q and k, in this order, when the mask is a function of them.
        blocks: the blocks that flex_attention looks at: (counts, indices) of those that the mask function decides in,
            then of those that are seen whole. block_size: of queries and of keys.
    """

    tensor: RecordedTensor
    mask: PackedMask
    assumed: bool
    where: str
    tokens: tuple[Size, ...]
    rows: tuple[Size, ...]
    indices: tuple[Ref | None, ...] = ()
    blocks: tuple[RecordedTensor, ...] = ()
    block_size: tuple[int, int] = (1, 1)
