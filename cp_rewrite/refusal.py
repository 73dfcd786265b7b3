"""Why a graph can't be rewritten: values, not log lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

BACKWARD_HOOKS = (
    "a hook of the backward inside of the model is not in the graph: change a gradient by a torch.autograd.Function in "
    "forward or in a forward hook; look at those of weights (`weight.register_hook`) or of the whole model"
)
"""Advice where a module, or a tensor of its forward, has a hook of the backward."""
ADAPTED_PARAMETER = (
    "adapters of PEFT on a parameter (target_parameters; target_modules='all-linear' has them on experts and routers, "
    "too) change it in each call, which can't be traced: adapt linear layers by their names and train routers whole, "
    "LoraConfig(target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj'], modules_to_save=['gate']), or as the model "
    "names them"
)
"""Advice where PEFT has wrapped a parameter, as of experts."""


class Reason(Enum):
    """A reason that stands in the way of a rewrite. The value says what a user can do about it."""

    MASK_NOT_PACKED = "the mask is no conjunction of same-document, causal and window terms"
    MASK_OPAQUE = "the mask comes in as a tensor, so the graph does not show its meaning; state it with assume_mask"
    MASK_UNSUPPORTED_OP = "an op of the mask's computation has no rule"
    MASK_WRONG_SOURCE = "the mask tells documents apart by another tensor than the annotation's packing"
    DOCUMENTS_SEEN = (
        "no mask keeps them apart here; causal models of transformers need use_cache=False, as a cache switches their "
        "packed mask off, its encoders one document a row; Sharding(across_documents=True) if it is meant"
    )
    MASK_WRONG_DIM = "the mask does not run over query tokens and key tokens of one row"
    DROPOUT = "dropout and noise draw other random numbers on a shard; set dropout to 0 or call model.eval()"
    UNREAD_ATTENTION = (
        "attention of this kind is not read; call scaled_dot_product_attention, flex_attention or varlen_attn"
    )
    QK_LENGTH = "query and key lengths differ (a KV cache?); context parallelism is for self-attention over a row"
    SHAPE = "an operand's shape does not fit"
    KERNEL = "no kernel can run this attention"
    EXCHANGE = "no exchange can serve this attention"
    TOKEN_MIXING = "an op outside attention mixes tokens, which a shard can't do"
    NO_LOCALITY_RULE = (
        "an op has no token-locality rule; vouch for it with Sharding(local_ops=(…,)) if it acts per token"
    )
    POSITION_GENERATOR = "positions, or counts of tokens, are made inside the model and can't be made global"
    TOKEN_INPUT = "an annotated argument does not carry the token dim the annotation says"
    TOKEN_COUNT = "the model decides by the number of tokens; make it decide alike for a shard and for the whole row"
    GRAPH_BREAK = "code between two graphs is not seen; compile with fullgraph=True, which names the line to change"
    RECOMPUTED = "a checkpointed block reads a buffer that the model changes behind it, and is computed again with that"
    CAPACITY = "tables of fixed sizes can't serve this; leave capacity out"
    NESTED_REGION = "attention sits in a nested region that can't be rewritten"


@dataclass(frozen=True)
class Refusal:
    """One reason why a rewrite is not possible.

    Args:
        reason: the kind.
        detail: what was found, in words that name the tensors.
        node: of the Dynamo graph where it was found, if there is one. It is not pickled.
        line: what `where` says once the node is gone.
    """

    reason: Reason
    detail: str
    node: fx.Node | None = None
    line: str | None = field(default=None, repr=False, compare=False)

    @property
    def where(self) -> str:
        """`file:line` of the user's code that made the node, or the node's name."""
        if self.line is not None:
            return self.line
        return source_line(self.node) if self.node is not None else "graph"

    def __reduce__(self) -> tuple[Any, ...]:
        return Refusal, (self.reason, self.detail, None, self.where)

    def __str__(self) -> str:
        return f"{self.where}: {self.reason.name}: {self.detail} ({self.reason.value})"


class RewriteRefused(RuntimeError):
    """Raised under `strict=True` when a graph can't be proven right.

    Args:
        refusals: every reason. tokens: of a row of the batch. right: rows of so many tokens were right before.
    """

    __module__ = "cp_rewrite"  # as it is imported, and printed

    def __init__(self, refusals: Sequence[Refusal], tokens: int | None = None, right: Sequence[int] = ()) -> None:
        self.refusals, self.tokens, self.right = tuple(refusals), tokens, tuple(right)
        lines = "\n".join(f"  - {refusal}" for refusal in folded(self.refusals))
        known = ", ".join(map(str, self.right))
        later = (
            f"\nthis row has {tokens} tokens, and rows of {known} were right: cp.explain(model, sharding, lengths=[…]) "
            "tells which others are; pad rows to one of these"
        )
        super().__init__(
            f"cp_rewrite refused to rewrite this graph:\n{lines}\nwhat to do: {pages_of(refusals)}"
            f"{later if right else ''}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return RewriteRefused, (self.refusals, self.tokens, self.right)


def pages_of(refusals: Sequence[Refusal]) -> str:
    """The headings that say what to do, each once."""
    return ", ".join(dict.fromkeys(f"docs/refusals.md#{refusal.reason.name.lower()}" for refusal in refusals))


def folded(refusals: Sequence[Refusal]) -> list[str]:
    """The refusals' texts, once for those of repeated layers, which differ in numbers of nodes only."""
    groups: dict[str, list[Refusal]] = {}
    for refusal in refusals:
        groups.setdefault(re.sub(r"_\d+\b", "", str(refusal)), []).append(refusal)
    return [f"{group[0]}{_times(group)}" for group in groups.values()]


def _times(group: Sequence[Refusal]) -> str:
    """` (in 32 layers)` where each node is of a module of its own."""
    if len(group) == 1:
        return ""
    stacks = [r.node.meta.get("nn_module_stack") if r.node is not None else None for r in group]
    layers = {str([*stack.values()][-1][0]) for stack in stacks if stack}
    return f" (in {len(group)} layers)" if len(layers) == len(group) else f" ({len(group)} times)"


_TORCH_AND_US = tuple(f"{Path(str(file)).parent}/" for file in (torch.__file__, __file__))
_OF_ALL_MODELS = ("/transformers/masking_utils.py", "/transformers/utils/")


def source_line(node: fx.Node, in_model: bool = True) -> str:
    """`file:line, code` of the innermost frame outside of torch and this package in the node's stack trace; its name
    without one. `in_model`: outside, too, of what makes masks for all models of transformers."""
    apart = _TORCH_AND_US + _OF_ALL_MODELS * in_model
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip()]
    frames = [i for i, line in enumerate(lines) if line.startswith("File ")]
    for i in sorted(frames, key=lambda i: (not any(place in lines[i] for place in apart), i), reverse=True):
        file, number = lines[i].split(",")[:2]
        code = f", `{lines[i + 1]}`" if i + 1 < len(lines) else ""
        return f"{file[5:].strip().strip(chr(34))}:{number.split()[-1]}{code}"
    return node.name
