"""Prove that nothing but attention mixes tokens, and that nothing takes offsets that were filled up for a batch's own.

Offsets of documents that a capacity fills up: nothing may count them, add them up, or pick tokens by them.

capacity.documents = 5        cu_seqlens   0 9 13 16        of the batch
                                           0 9 13 16 16 16  of every batch's size, as the model gets it

A token's place among them, and what is looked up there, are as on one process. A mean over them is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch.utils._pytree import tree_leaves

from cp_rewrite.packing import CuSeqlens, packing_args
from cp_rewrite.passes.graph.nodes import op_name, value_of
from cp_rewrite.passes.graph.regions import region_call
from cp_rewrite.passes.values.state import State
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import expression

from .liveness import Reader, live_nodes
from .walk import check_locality

_ALONE = frozenset(
    "add sub mul div to long int float type contiguous detach clone diff clamp unsqueeze eq ne lt le gt ge".split()
)
"""Ops that give an entry for each offset, of it or of two that stand side by side."""
_SOURCE_FIRST = frozenset({"index_select", "gather", "take"})


def check_token_locality(state: State) -> State:
    """Prove that nothing but attention mixes tokens."""
    found = check_locality(
        state.graph_module,
        state.sharding,
        state.sites,
        state.tokens,
        refused=state.refused,
        kept=state.frame.kept,
    )
    filled = _check_filled_offsets(state.graph_module, state.sharding, state.sites, state.tokens.names)
    refusals = dict.fromkeys((*state.refusals, *found.refusals, *filled))
    return replace(state, locality=found, refusals=tuple(refusals))


def _check_filled_offsets(
    gm: fx.GraphModule, sharding: Sharding, sites: Sequence[Reader], names: Mapping[fx.Node, str]
) -> list[Refusal]:
    """Why a model can't be given offsets that are filled up. names: of the graph's inputs."""
    if sharding.capacity is None or not isinstance(sharding.packing, CuSeqlens):
        return []
    given = [
        node for node in gm.graph.find_nodes(op="placeholder") if names.get(node) in packing_args(sharding.packing)
    ]
    live, attention = live_nodes(gm, sites), {site.node for site in sites}
    found: dict[fx.Node, None] = {}
    filled = dict.fromkeys(given)
    for node in (pending := [*given]):
        for user in node.users:
            if user not in live or user in attention:
                continue
            call = region_call(user)
            if call is not None:
                read = [inner for inner, operand in call.filled.items() if operand is node and inner in live]
            elif _keeps_entries(user, node):
                read = [user]
            else:
                read = []
                if not _looks_up(user, node, original=node in given):
                    found[user] = None
            pending += [x for x in read if x not in filled]
            filled |= dict.fromkeys(read)
    counts = {symbol for node in given for symbol in expression(value_of(node).shape[0]).free_symbols}
    found |= dict.fromkeys(node for node in live if _is_count(node, counts) and node.op != "placeholder")
    # Of a size that is fixed, counts are plain numbers of the graph.
    found |= dict.fromkeys(node for node in given if not expression(value_of(node).shape[0]).free_symbols)
    return [Refusal(Reason.CAPACITY, _DETAIL, node) for node in found]


_DETAIL = (
    "offsets of documents are filled up to capacity.documents + 1 entries, which are no documents: they may tell a "
    "token's document, by searchsorted, and be looked up by it, but not be counted, summed or picked by"
)


def _keeps_entries(user: fx.Node, node: fx.Node) -> bool:
    if op_name(user) == "getitem":
        index: Any = user.args[1]
        parts = index if isinstance(index, tuple) else (index,)
        plain = all(part is None or part is Ellipsis or isinstance(part, slice) for part in parts)
        return user.args[0] is node and plain and all(_from_the_front(part) for part in parts)
    return op_name(user) in _ALONE


def _from_the_front(part: Any) -> bool:
    """Whether a slice begins at a place that is counted from the first entry, and leaves none out."""
    return not isinstance(part, slice) or (part.start in (None, 0, 1) and part.step in (None, 1))


def _looks_up(user: fx.Node, node: fx.Node, original: bool) -> bool:
    """Whether an op reads entries at places that tokens have among them, or tells these places."""
    name = op_name(user)
    if name == "searchsorted":
        return user.args[0] is node and user.args[1:2] != (node,)
    if name == "bucketize":
        return user.args[0] is not node
    if name == "getitem":
        index: Any = user.args[1]
        if user.args[0] is not node or node in tree_leaves(index):
            return False
        ints = [part for part in tree_leaves(index) if isinstance(part, int)]
        return all(part >= 0 or (original and part == -1) for part in ints)
    return name in _SOURCE_FIRST and user.args[0] is node and node not in user.args[1:]


def _is_count(node: fx.Node, counts: set[Any]) -> bool:
    value = value_of(node)
    return isinstance(value, torch.SymInt) and bool(expression(value).free_symbols & counts)
