"""What matching finds in a graph: values that later passes read and never change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from cp_rewrite.masks import PackedMask


@dataclass(frozen=True)
class Site:
    """One attention node whose mask is proven, in one normal form for every spelling.

    Args:
        node: the node of the Dynamo graph whose tensor is attention's output, (B, Hq, T, Dv) or in another `form`.
        graph_module: the (sub)graph module that holds `node`; the root, or the body of a nested region.
        query: node of (B, Hq, T, D). key, value: nodes of (B, Hkv, T, D) and (B, Hkv, T, Dv), GQA heads not expanded.
        form: the dims of query, key, value and output: "BHTD"; "BTHD"; "BTD" of one head; "HTD" of one row; or "THD",
            rows of one packed row.
        mask: what the mask means over the global row.
        mask_node: the node that the attention node takes its mask from, None for `is_causal` or no mask.
        logits: where the mask is part of the logits: nodes from the bare logits to `mask_node`.
        scale: softmax scale; None means 1 / sqrt(D).
        softcap: logits become softcap * tanh(logits / softcap); 0.0 means none.
        sinks: node of (Hq,), one more logit per head, which draws weight and adds no value; None for none.
        assumed: the mask is the user's word (`assume_mask`), not proven.
    """

    node: fx.Node
    graph_module: fx.GraphModule
    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: PackedMask
    mask_node: fx.Node | None = None
    scale: float | None = None
    softcap: float = 0.0
    assumed: bool = False
    logits: tuple[fx.Node, ...] = ()
    sinks: fx.Node | None = None
    form: str = "BHTD"

    def heads_of(self, node: fx.Node) -> Any:
        """How many heads one of the operands has."""
        return node.meta["example_value"].shape[self.form.index("H")] if "H" in self.form else 1

    @property
    def operands(self) -> list[fx.Node]:
        """What the attention that takes the node's place reads."""
        return [self.query, self.key, self.value, *([] if self.sinks is None else [self.sinks])]
