"""What to do about an op that mixes tokens: it depends on what the op is for."""

from __future__ import annotations

import re

import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.nodes import op_name

SHIFT_HINT = (
    "shift labels over the global row before they are cut: sharding.shard(batch, shift_labels=True), "
    "and give the model shift_labels"
)
TABLE_HINT = "takes as many rows of a table as the shard has tokens: index the table by position_ids"
MEAN_HINT = "return sums and use cp.token_mean(sum, count, sharding), or divide a sum by num_items_in_batch"
COUNT_HINT = (
    "make it of the whole row before the batch is cut, and pass it as an argument; the number of tokens alone is "
    "torch.ones(T).sum()"
)
_BEFORE = "make it from the global row, before the batch is cut, and name it in tokens"
_SCAN = "a scan over tokens (linear attention, a state-space model, a recurrence) can't be sharded here"
_CHUNKS = (
    "a loop over chunks runs on all tokens where it treats each of them alike, and only adds up their sums "
    "(`total = total + x`) or joins their rows in order (`torch.cat`)"
)
_ADVICE = {
    "convolution": "a convolution over tokens reads those beside each, which other ranks may hold: it can't be sharded "
    "here",
    "pool": "pooling over tokens reads those beside each, which other ranks may hold: it can't be sharded here",
    "chunks": _SCAN,
    "pads": "a shift over tokens reads some that another rank may hold: shift by a fixed number, with resolve=True",
    "cumsum cumprod cummax cummin logcumsumexp": "a running sum over tokens needs those before each, which other ranks "
    "may hold",
    "roll slice constant_pad_nd cat": "a shift over tokens, or a choice by their place, reads tokens that another rank "
    "may hold: it can't be sharded here",
}
"""Of floating-point tensors, by words in the ops' names and verbs."""

_LOSSES = frozenset({"cross_entropy", "nll_loss", "cross_entropy_loss", "log_softmax", "linear_cross_entropy"})
_COPIES = frozenset(
    "contiguous view reshape flatten unflatten squeeze unsqueeze to float long int type clone detach getitem pad "
    "transpose permute".split()
)


def advice(node: fx.Node | None, op: str, x: Tensor) -> str:
    """What to do about an op that ran below `node` over the tokens of `x`; "" where that is not known.

    `op`: its name, and the verb that refusals say.
    """
    if op.startswith("split"):
        return f"; {_CHUNKS}"
    if node is not None and _feeds_loss(node):
        return f"; {SHIFT_HINT}"
    if not x.is_floating_point():
        return f"; {_BEFORE}"
    return next((f"; {text}" for words, text in _ADVICE.items() if any(word in op for word in words.split())), "")


def kind_by_name(name: str) -> str:
    """What an op without a rule is, where its name tells that no token goes through it alone; "" elsewhere."""
    if re.search(r"attn|attention|fmha|sdpa", name):
        return "attention"
    return "a scan" if re.search(r"scan|ssm|ssd|mamba|delta_rule|retention|linear_att", name) else ""


def _feeds_loss(node: fx.Node) -> bool:
    """Whether what a node gives goes into a loss as it is: labels, or the scores of the tokens that have one."""
    seen: set[fx.Node] = set()
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if op_name(user) in _LOSSES:
            return True
        if user not in seen and op_name(user) in _COPIES:
            seen.add(user)
            pending += user.users
    return False
