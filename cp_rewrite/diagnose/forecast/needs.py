"""What a captured graph keeps for its backward, layer by layer, about as torch's compilers do.

Kept are operands of matrix products, of attention and of recurrences, and results of products that something not linear
reads: these are not computed again. Recurrences by kernels also keep what their forward solved. Views share what they
are views of; sums of residual streams are computed again of what was added, or are what enters the next layer.

    normed -> q, k, v -> rotated -> attention -> out -> + -> normed -> gate, up -> silu, times -> down -> +
    kept            v    kept       kept        kept         kept      kept         kept
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch.fx as fx
from torch import SymInt, Tensor, nn

from cp_rewrite.kernels.select import DeviceFacts
from cp_rewrite.kernels.states.select import SOLVED, runs_by_kernels
from cp_rewrite.ops.states.kinds import inputs_of, state_shapes, wide
from cp_rewrite.passes.graph.nodes import bind, needs_gradient, op_name, value_of
from cp_rewrite.passes.graph.regions import graph_modules, is_checkpoint, region_call
from cp_rewrite.passes.locality.rules.over_ranks.recurrences import kind_of
from cp_rewrite.planning.cost.constants import TILE_GAIN, TILE_GAIN_AGAIN
from cp_rewrite.planning.cost.memory import Layer, Needs
from cp_rewrite.planning.token_reads.chunks import CHUNK
from cp_rewrite.torch_internals import hint

_ATTENTION = frozenset({"scaled_dot_product_attention", "flex_attention"})
_GROUPED = frozenset({"grouped_mm", "_grouped_mm", "grouped_mm_fallback"})
"""Products of rows that are sorted by expert: where each stands depends on all rows, so that none run in tiles."""
_PRODUCTS = _ATTENTION | _GROUPED | frozenset("linear matmul mm bmm addmm baddbmm einsum conv1d bilinear".split())
_VIEWS = frozenset(
    "view reshape transpose permute contiguous expand getitem flatten unflatten squeeze unsqueeze to float bfloat16 "
    "half type type_as movedim swapaxes chunk split tensor_split unbind narrow select view_as expand_as detach".split()
)
_LINEAR = _VIEWS | frozenset(
    "add sub neg cat stack sum mean repeat repeat_interleave roll pad dropout where masked_fill index_select".split()
)
_LAYER = re.compile(r"^(.*?(?:\.|\[)\d+\]?)(?=\.|$)")
"""Of a module's path as Dynamo writes it, the part up to its first number: an entry of the model's lists."""


def needs_of(model: nn.Module, gm: fx.GraphModule, tokens: int, target: DeviceFacts | None = None) -> Needs:
    """What a training step of `model` needs, of the graph that was captured of its forward on `tokens` local rows.
    target: of the GPUs that it is for; None: it runs here."""
    graph = _Graph(gm, tokens, target)
    layers = {path: graph.layer(path) for path in graph.paths if path}
    weights = _weights_by_layer(model, layers)
    found = [
        Layer(*weights[path], **sizes, states=graph.states(path), checkpointed=path in graph.checkpointed)
        for path, sizes in layers.items()
    ]
    # The widest product outside of layers is the logits, which are counted by themselves.
    logits = max((graph.size(n) for n in graph.products[""] if layers), default=0.0)
    outside = graph.layer("")["kept"] - logits
    returned = logits > 0 and any(graph.size(n) >= logits for n in gm.graph.output_node().all_input_nodes)
    return Needs(tuple(found), *weights[""], outside, logits, returned)


def logits_of(needs: Needs, gm: fx.GraphModule, tokens: int) -> tuple[bool, bool]:
    """Of a graph that passes rewrote: (has it logits of all rows that tiles would spare, does it return them)."""
    graph = _Graph(gm, tokens, None)
    widest = max((layer.enters for layer in needs.layers), default=0.0)
    if needs.logits < TILE_GAIN * widest or not needs.logits:
        return False, needs.returned
    has = any(graph.size(node) >= needs.logits for node in gm.graph.nodes if node.op != "output")
    return has, any(graph.size(node) >= needs.logits for node in gm.graph.output_node().all_input_nodes)


@dataclass
class _Graph:
    """A graph with its regions, as far as gradients and tokens reach; it is read, not changed."""

    gm: fx.GraphModule
    tokens: int
    target: DeviceFacts | None
    checkpointed: set[str] = field(default_factory=set[str])
    products: dict[str, dict[fx.Node, None]] = field(default_factory=lambda: defaultdict(dict))
    """Of each layer."""
    _paths: dict[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    _nodes: dict[str, list[fx.Node]] = field(default_factory=lambda: defaultdict(list))
    _operands: dict[fx.Node, Any] = field(default_factory=dict[fx.Node, Any])
    """Placeholders of regions -> what their call fills them with."""

    def __post_init__(self) -> None:
        for module in graph_modules(self.gm):
            for node in module.graph.nodes:
                call = region_call(node)
                if call is not None:
                    self._operands |= call.filled
                    if is_checkpoint(node):
                        self.checkpointed |= {self.path(n) for n in call.body.graph.nodes} - {""}
                self._nodes[self.path(node)].append(node)
                if _is_product(node) and self.size(node):
                    self.products[self.path(node)][node] = None

    @property
    def paths(self) -> Collection[str]:
        return [path for path in self._nodes if path == "" or self.products[path]]

    def path(self, node: fx.Node) -> str:
        """The layer that a node stands in, as Dynamo names it; "" outside of layers."""
        if node not in self._paths:
            stack: Any = node.meta.get("nn_module_stack") or {}
            found = (_LAYER.match(str(path)) for path, _ in stack.values())
            self._paths[node] = next((match[1] for match in found if match), "")
        return self._paths[node]

    def size(self, node: fx.Node) -> float:
        """Elements per token of a tensor that gradients reach; 0 of others, and of scores of tokens by tokens."""
        value = value_of(node)
        if not isinstance(value, Tensor) or not value.requires_grad or not value.is_floating_point():
            return 0.0
        if sum(isinstance(size, SymInt) for size in value.shape) != 1:
            return 0.0
        numel: Any = value.numel()
        return float(hint(numel) or 0) / self.tokens

    def base(self, node: fx.Node) -> fx.Node:
        """What a node is a view of, across the borders of regions."""
        while True:
            if node.op == "placeholder" and isinstance(self._operands.get(node), fx.Node):
                node = self._operands[node]
            elif _is_view(node):
                node = node.all_input_nodes[0]
            else:
                return node

    def kept(self, path: str) -> list[fx.Node]:
        """What the backward of a layer reads, what enters it left out."""
        found: dict[fx.Node, None] = {}
        for node in self._nodes[path]:
            if node not in self.products[path]:
                continue
            if self._is_read(node, path):
                found[node] = None
            for operand in node.all_input_nodes:
                others = [n for n in node.all_input_nodes if n is not operand]
                base = self.base(operand)
                if self.size(base) and any(map(needs_gradient, others)) and self.path(base) == path:
                    found[base] = None
        return [*found]

    def layer(self, path: str) -> dict[str, float]:
        """Sizes of a layer, as `Layer` names them."""
        kept, own = self.kept(path), self.products[path]
        order = {node: i for i, node in enumerate(self._nodes[path]) if node.op != "output"}
        entering = {
            self.base(n): None for node in order for n in node.all_input_nodes if self.path(self.base(n)) != path
        }
        enters = max(map(self.size, entering), default=0.0)
        least = 2 * TILE_GAIN_AGAIN * enters
        attends = [node for node in own if op_name(node) in _ATTENTION]
        last = max((order[node] for node in attends), default=0)
        products = [node for node in own if op_name(node) in _GROUPED]
        grouped = {self.base(n) for node in products for n in (node, *node.all_input_nodes)}
        queries, keys = (max((self._read(node, at) for node in attends), default=0.0) for at in ([0], [1, 2]))
        return {
            "enters": enters,
            "kept": enters + sum(map(self.size, kept)) + sum(map(self.solved, own)),
            "before_attention": enters + sum(self.size(node) for node in kept if order.get(node, 0) <= last),
            "widest": max(map(self.size, (*kept, *own)), default=0.0),
            "wide": sum((size for n in kept if (size := self.size(n)) >= least and n not in grouped), 0.0),
            "grouped": max(map(self.size, grouped), default=0.0),
            "queries": queries,
            "keys": keys,
        }

    def states(self, path: str) -> int:
        """Bytes of what enters a cut piece of a layer's recurrences, and of what moves it."""
        found = 0
        for node in self.products[path]:
            kind = kind_of(node)
            if kind is not None:
                inputs = _inputs(kind, node)
                found += wide(inputs[0].dtype).itemsize * sum(map(math.prod, state_shapes(kind, inputs)))
        return found

    def solved(self, node: fx.Node) -> int:
        """Elements per token that the forward of a recurrence by kernels solves for its backward."""
        kind = kind_of(node)
        if kind not in SOLVED:
            return 0
        inputs = _inputs(kind, node)
        return SOLVED[kind] * inputs[2].shape[2] * CHUNK if runs_by_kernels(kind, inputs, self.target) else 0

    def _read(self, node: fx.Node, places: list[int]) -> float:
        """Elements per token of some operands of attention, before heads were repeated."""
        given = [n for n in (*node.args, *(node.kwargs[k] for k in ("query", "key", "value") if k in node.kwargs))]
        nodes = [n for i in places if isinstance(n := given[i], fx.Node)]
        return sum(min(self.size(n), self.size(self.base(n))) for n in nodes)

    def _is_read(self, node: fx.Node, path: str) -> bool:
        """Whether something of the layer that is not linear reads a product's result, other products left aside."""
        return any(self._bends(user, path) for user in _readers(node))

    def _bends(self, user: fx.Node, path: str) -> bool:
        same = self.path(user) == path and user.op != "output" and needs_gradient(user)
        return same and not _is_product(user) and not _is_region(user)


def _is_product(node: fx.Node) -> bool:
    """Whether a node's backward reads its operands, and computes none of them again."""
    return op_name(node) in _PRODUCTS or kind_of(node) is not None


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a node, behind what is linear."""
    seen, pending = {node}, [node]
    while pending:
        for user in pending.pop().users.keys() - seen:
            seen.add(user)
            if _is_linear(user):
                pending.append(user)
            else:
                yield user


def _inputs(kind: str, node: fx.Node) -> list[Tensor]:
    """Tensors that a recurrence is given, in the order of `INPUTS`."""
    return [value_of(x) for x in inputs_of(kind, SimpleNamespace(**bind(node)))]


def _is_view(node: fx.Node) -> bool:
    """Whether a node shows what its one tensor holds; what is picked by a tensor of places is a copy."""
    tensors = [n for n in node.all_input_nodes if not isinstance(value_of(n), SymInt | int)]
    return op_name(node) in _VIEWS and len(tensors) == 1 and not _is_region(tensors[0])


def _is_region(node: fx.Node) -> bool:
    return region_call(node) is not None


def _is_linear(node: fx.Node) -> bool:
    """Whether a node's backward reads none of its operands that gradients reach."""
    if op_name(node) in ("mul", "div", "truediv", "multiply"):
        return sum(map(needs_gradient, node.all_input_nodes)) < 2
    return op_name(node) in _LINEAR


def _weights_by_layer(model: nn.Module, layers: Collection[str]) -> dict[str, tuple[int, int]]:
    """(parameters, trained ones) of each layer, by the path that Dynamo gives it, and of what is in none by ""."""
    counts: dict[str, list[int]] = {path: [0, 0] for path in ("", *layers)}
    short = {_plain(path): path for path in layers}
    for name, weight in model.named_parameters():
        found = _LAYER.match(name)
        path = short.get(found[1], "") if found else ""
        counts[path][0] += weight.numel()
        counts[path][1] += weight.numel() if weight.requires_grad else 0
    return {path: (total, trained) for path, (total, trained) in counts.items()}


def _plain(path: str) -> str:
    """`L['self'].model.layers[0]` as a parameter's name begins: `model.layers.0`."""
    return re.sub(r"\[(\d+)\]", r".\1", path.partition("].")[2] if path.startswith("L[") else path)
