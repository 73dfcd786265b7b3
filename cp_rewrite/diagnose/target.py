"""A training step on the machine that training will run on, by its captured graph: memory, seconds of attention, bytes
between GPUs.

    needs_of              memory that the graph keeps for its backward, layer by layer
    Attention, Target     attention of each site, and the step
    target_of             the step of a graph whose sites are decided
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch.fx as fx
from torch import SymInt, Tensor, nn

from cp_rewrite.experts.choose import chosen_of
from cp_rewrite.experts.families import places, weights_of, widths_of
from cp_rewrite.experts.layers import Experts, is_layer_of_experts
from cp_rewrite.kernels.select import DeviceFacts
from cp_rewrite.kernels.states.select import SOLVED, runs_by_kernels
from cp_rewrite.ops.states.maps import inputs_of, state_shapes, wide
from cp_rewrite.passes.graph.nodes import (
    bind,
    graph_modules,
    is_checkpoint,
    needs_gradient,
    op_name,
    region_call,
    value_of,
)
from cp_rewrite.passes.locality.rules.states import OnPieces, kind_of
from cp_rewrite.passes.plan_sites import between_gpus, inner_ranks, is_dry_run, most_of, spec_of, target_speeds
from cp_rewrite.passes.values.state import State
from cp_rewrite.planning.choose_exchange import exchange_seconds, needed_bytes, scattered_bytes
from cp_rewrite.planning.cost.constants import BACKWARD_FLOPS, BESIDE_TENSORS, PRODUCTS, TILE_GAIN_AGAIN
from cp_rewrite.planning.cost.devices import DEVICES, Device, Model, SiteKind
from cp_rewrite.planning.cost.load import load_of
from cp_rewrite.planning.cost.memory import ExpertLayer, Layer, Memory, Needs, Share, amount, predict
from cp_rewrite.planning.cost.tiles import imbalance
from cp_rewrite.planning.intervals import CHUNK
from cp_rewrite.planning.names import part_of
from cp_rewrite.planning.routes.grid import outer_schedule
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
_LAYER = re.compile(r"^((?:L\['args'\]\[\d+\])?+.*?(?:\.|\[)\d+\]?)(?=\.|$)")
"""Matches a module's path, as Dynamo writes it, up to its first number: an entry of the model's lists. The model may be
`L['args'][0]` itself, as where a decorator of its forward takes `*args`."""


@dataclass(frozen=True)
class GraphNeeds:
    """Needs of a graph, and the nodes behind what tiles may spare. head: what makes the loss's logits. wide: of each
    layer, its wide tensors' nodes -> elements per token. wide_beside: of these, those beside layers of experts."""

    needs: Needs
    head: fx.Node | None
    wide: tuple[Mapping[fx.Node, float], ...]
    wide_beside: tuple[Mapping[fx.Node, float], ...]

    def after(self, gm: fx.GraphModule, origin: Mapping[fx.Node, fx.Node]) -> Needs:
        """The needs once passes have put into tiles what they could: what the graph still has is in none.

        Layers that are not checkpointed stay: tiles spare less there than where the backward computes all again.
        `origin`: of nodes that are copies, the node of the graph."""
        there = {node for body in graph_modules(gm) for node in body.graph.nodes}
        there |= {copy for copy, node in origin.items() if node in there}

        def left(nodes: Mapping[fx.Node, float]) -> float:
            return sum(size for node, size in nodes.items() if node not in there)

        layers = [
            replace(layer, wide=left(wide), wide_beside=left(beside)) if layer.checkpointed else layer
            for layer, wide, beside in zip(self.needs.layers, self.wide, self.wide_beside, strict=True)
        ]
        has = self.head is not None and self.head in there
        returned = self.head is not None and has and is_given(origin.get(self.head, self.head))
        return replace(self.needs, layers=tuple(layers), returned=returned, whole_logits=has)


def needs_of(model: nn.Module, gm: fx.GraphModule, tokens: int, target: DeviceFacts | None = None) -> GraphNeeds:
    """Needs of a training step of `model`, by the graph that was captured of its forward on `tokens` local rows.
    target: of the GPUs that it is for; None: it runs here.

    Memory that the graph keeps for its backward is counted layer by layer, about as torch's compilers keep it: operands
    of matrix products, of attention and of recurrences, and results of products that something not linear reads: these
    are not computed again. Recurrences by kernels also keep what their forward solved. Views share what they are views
    of; sums of residual streams are computed again of what was added, or are what enters the next layer.

        normed -> q, k, v -> rotated -> attention -> out -> + -> normed -> gate, up -> silu, times -> down -> +
        kept            v    kept       kept        kept         kept      kept         kept
    """
    known = {name: module for name, module in model.named_modules() if is_layer_of_experts(module)}
    names = {name: module for name, module in known.items() if {"up", "down"} <= places(module).keys()}  # not adapted
    holders = {place.module for module in names.values() for place in places(module).values()}
    graph = _Graph(gm, tokens, target, frozenset(name for name, module in model.named_modules() if module in holders))
    paths = [path for path in graph.paths if path]
    short = {_plain(path): path for path in paths}
    weights = _weights_by_layer(model, short)
    experts: dict[str, list[ExpertLayer]] = defaultdict(list)
    for name, module in names.items():
        chosen = graph.chosen.get(name) or min(chosen_of(module), widths_of(module).experts)
        experts[_layer_of(name, short)].append(_sizes_of(module, chosen))
    wide = tuple(graph.wide(path) for path in paths)
    beside = tuple(graph.wide(path, beside=True) for path in paths) if graph.of_experts else wide
    found = [
        Layer(
            *weights[path],
            experts=tuple(experts[path]),
            **graph.layer(path),
            wide=sum(nodes.values()),
            wide_beside=sum(others.values()),
            states=graph.states(path),
            work=graph.work(path),
            checkpointed=path in graph.checkpointed,
        )
        for path, nodes, others in zip(paths, wide, beside, strict=True)
    ]
    # The widest product outside of layers is the logits, which are counted by themselves.
    head = max(graph.products[""], key=graph.size, default=None) if paths else None
    logits = graph.size(head) if head else 0.0
    outside = graph.layer("")["kept"] - logits
    returned = head is not None and is_given(head)
    work = graph.work("")
    needs = Needs(tuple(found), *weights[""], outside, logits, returned, work=work)
    return GraphNeeds(needs, head, wide, beside)


def is_given(node: fx.Node) -> bool:
    """True if a graph gives a node's tensor, or one that is made of it and as large."""
    size, pending, seen = hint(value_of(node).numel()), [node], {node}
    while pending:
        for user in pending.pop().users.keys() - seen:
            if user.op == "output":
                return True
            seen.add(user)
            value = value_of(user)
            if isinstance(value, Tensor) and hint(value.numel()) == size:
                pending.append(user)
    return False


@dataclass
class _Graph:
    """A graph with its regions, as far as gradients and tokens reach; it is read, not changed."""

    gm: fx.GraphModule
    tokens: int
    target: DeviceFacts | None
    expert_layers: frozenset[str]
    """Names of modules that hold weights of experts that ranks can share."""
    checkpointed: set[str] = field(default_factory=set[str])
    products: dict[str, dict[fx.Node, None]] = field(default_factory=lambda: defaultdict(dict))
    """Layer -> its matrix products."""
    chosen: dict[str, int] = field(default_factory=dict[str, int])
    """Layers of experts that run as one op, by name -> experts that a token has."""
    of_experts: set[fx.Node] = field(default_factory=set[fx.Node])
    """Products in layers of experts that ranks can share."""
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
                if _is_product(node) and self._expert_layers_around(node):
                    self.of_experts.add(node)
                if op_name(node) == "experts.default":
                    width: int = value_of(bind(node)["chosen"]).shape[1]
                    self.chosen |= dict.fromkeys(self._expert_layers_around(node), width)

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
        """The node that a node is a view of, across the borders of regions."""
        while True:
            if node.op == "placeholder" and isinstance(self._operands.get(node), fx.Node):
                node = self._operands[node]
            elif _is_view(node):
                node = node.all_input_nodes[0]
            else:
                return node

    def _expert_layers_around(self, node: fx.Node) -> set[str]:
        """Names of the layers of experts that a node stands in."""
        stack: Any = node.meta.get("nn_module_stack") or {}
        return {_plain(str(path)) for path, _ in stack.values()} & self.expert_layers if self.expert_layers else set()

    def kept(self, path: str, beside: bool = False) -> list[fx.Node]:
        """Tensors that the backward of a layer reads, but for those that enter it. beside: what it reads beside its
        layers of experts."""
        found: dict[fx.Node, None] = {}
        for node in self._nodes[path]:
            if node not in self.products[path] or (beside and node in self.of_experts):
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
        kept, own, enters = self.kept(path), self.products[path], self.enters(path)
        beside = self.kept(path, beside=True) if self.of_experts else kept
        solved = sum(map(self.solved, own))
        order = {node: i for i, node in enumerate(self._nodes[path]) if node.op != "output"}
        attends = [node for node in own if op_name(node) in _ATTENTION]
        last = max((order[node] for node in attends), default=0)
        queries, keys = (max((self._read(node, at) for node in attends), default=0.0) for at in ([0], [1, 2]))
        return {
            "enters": enters,
            "kept": enters + sum(map(self.size, kept)) + solved,
            "kept_beside": enters + sum(map(self.size, beside)) + solved,
            "before_attention": enters + sum(self.size(node) for node in kept if order.get(node, 0) <= last),
            "widest": max(map(self.size, (*kept, *own)), default=0.0),
            "widest_beside": max(map(self.size, (*beside, *(n for n in own if n not in self.of_experts))), default=0.0),
            "grouped": max(map(self.size, self.grouped(path)), default=0.0),
            "queries": queries,
            "keys": keys,
        }

    def enters(self, path: str) -> float:
        """Elements per token of the widest tensor that comes into a layer."""
        nodes = [n for node in self._nodes[path] if node.op != "output" for n in node.all_input_nodes]
        return max((self.size(base) for base in map(self.base, nodes) if self.path(base) != path), default=0.0)

    def grouped(self, path: str) -> set[fx.Node]:
        """Tensors that products of rows sorted by expert read and give."""
        products = [node for node in self.products[path] if op_name(node) in _GROUPED]
        return {self.base(n) for node in products for n in (node, *node.all_input_nodes)}

    def wide(self, path: str, beside: bool = False) -> dict[fx.Node, float]:
        """Tensors that tiles would hold some rows of, in a layer that is checkpointed -> elements per token. beside: as
        of `kept`."""
        least, grouped = 2 * TILE_GAIN_AGAIN * self.enters(path), self.grouped(path)
        return {n: size for n in self.kept(path, beside) if (size := self.size(n)) >= least and n not in grouped}

    def work(self, path: str) -> float:
        """Multiplications per token of a layer's matrix products, attention and recurrences left out."""
        found = 0.0
        for node in self.products[path]:
            if op_name(node) in _ATTENTION or kind_of(node) is not None:
                continue
            operands = [value_of(n) for n in node.all_input_nodes if self.size(n)]
            found += self.size(node) * max((int(hint(x.shape[-1]) or 1) for x in operands), default=1)
        return found

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
        """True if something of the layer that is not linear reads a product's result, other products left aside."""
        return any(self._bends(user, path) for user in _readers(node))

    def _bends(self, user: fx.Node, path: str) -> bool:
        same = self.path(user) == path and user.op != "output" and needs_gradient(user)
        return same and not _is_product(user) and not _is_region(user)


def _is_product(node: fx.Node) -> bool:
    """True if a node's backward reads its operands, and computes none of them again."""
    return op_name(node) in _PRODUCTS or kind_of(node) is not None


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Readers of a node, behind what is linear."""
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
    """True if a node shows what its one tensor holds; what is picked by a tensor of places is a copy."""
    tensors = [n for n in node.all_input_nodes if not isinstance(value_of(n), SymInt | int)]
    return op_name(node) in _VIEWS and len(tensors) == 1 and not _is_region(tensors[0])


def _is_region(node: fx.Node) -> bool:
    return region_call(node) is not None


def _is_linear(node: fx.Node) -> bool:
    """True if a node's backward reads none of its operands that gradients reach."""
    if op_name(node) in ("mul", "div", "truediv", "multiply"):
        return sum(map(needs_gradient, node.all_input_nodes)) < 2
    return op_name(node) in _LINEAR


def _weights_by_layer(model: nn.Module, layers: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """(parameters, trained ones) of each layer, by the path that Dynamo gives it, and of what is in none by "". layers:
    as of `_layer_of`."""
    counts: dict[str, list[int]] = {path: [0, 0] for path in ("", *layers.values())}
    for name, weight in model.named_parameters():
        path = _layer_of(name, layers)
        for i, counted in enumerate((True, weight.requires_grad)):
            counts[path][i] += weight.numel() if counted else 0
    return {path: (total, trained) for path, (total, trained) in counts.items()}


def _layer_of(name: str, layers: Mapping[str, str]) -> str:
    """The path of the layer that has the parameter or module of this name; "": none has. layers: as names of parameters
    begin (`_plain`) -> paths that Dynamo gives."""
    found = _LAYER.match(name)
    return layers.get(found[1], "") if found else ""


def _sizes_of(layer: Any, chosen: int) -> ExpertLayer:
    """Sizes of a layer of experts, of which a token has so many."""
    widths, weights = widths_of(layer), weights_of(layer)
    return ExpertLayer(
        **widths._asdict(),
        chosen=chosen,
        parameters=sum(p.numel() for p in weights),
        trained=sum(p.numel() for p in weights if p.requires_grad),
        is_op=isinstance(layer, Experts),
    )


def _plain(path: str) -> str:
    """`L['self'].model.layers[0]` as a parameter's name begins: `model.layers.0`."""
    return re.sub(r"\[(\d+)\]", r".\1", path.partition("].")[2] if path.startswith("L[") else path)


@dataclass(frozen=True)
class Attention:
    """One attention site's step on the target, forward and backward, in bf16. Bytes are those of its keys and values
    (under `a2a+…` of queries and results too) that the rank which needs most gets from others in the forward; the
    backward moves up to three times as many.

    Args:
        mask: what it sees. layers: how many layers have one like it.
        seconds: by exchange that can be asked for. exchange: the one that the annotation names, or the cheapest.
        imbalance: work of the rank that has most over the mean of ranks.
        inside, across: bytes from ranks of the same node, and of other nodes.
        expanded: KV rows that a rank's kernel reads, copies included, of the rank that reads most.
    """

    mask: str
    layers: int
    seconds: dict[str, float]
    exchange: str
    imbalance: float
    inside: int
    across: int
    expanded: int


@dataclass(frozen=True)
class Target:
    """A step on the machine that training will run on.

    Args:
        device: its name. device_bytes: memory of one GPU. world_size, ranks_per_node: ranks of the group, of a node.
        rows: local rows of a rank. attention: by site. needs: what the model keeps; None where it is no module.
        tile: of `Sharding(tile=…)`. speeds: of the device and its links.
        cuts: cut pieces of sequences that a rank keeps states of, of the rank with most.
        planned_for: heads and exchange that `balanced` plans later batches for; "": the layout is another one.
    """

    device: str
    device_bytes: int
    world_size: int
    ranks_per_node: int
    rows: int
    attention: tuple[Attention, ...]
    needs: Needs | None
    planned_for: str = ""
    cuts: int = 0
    tile: int | Literal["auto"] | None = None
    speeds: Device = DEVICES["h200"]

    @property
    def nodes(self) -> int:
        return -(-self.world_size // self.ranks_per_node)

    @property
    def room(self) -> int:
        """Bytes of one GPU for tensors."""
        return self.device_bytes - BESIDE_TENSORS

    def verdict(self, peak: int) -> str:
        """Words on a peak of so many bytes: it fits or not, and how close it is."""
        left = self.room - peak
        return f"fits, {amount(left, self.room)} left" if left >= 0 else f"does NOT fit, {amount(-left)} too much"

    @property
    def seconds(self) -> float:
        """Seconds of the attention of all layers, forward and backward."""
        return sum(site.layers * site.seconds[site.exchange] for site in self.attention)

    def share(self, data_parallel: int = 1) -> Share:
        """The share of a rank, with weights sharded over the group, `data_parallel` groups together."""
        expanded = max((site.expanded for site in self.attention), default=0)
        return Share(self.rows, expanded, self.world_size * data_parallel, self.cuts, tile=self.tile)

    @property
    def step_seconds(self) -> float:
        """Seconds of forward and backward, matrix products and attention alone; attention runs forward once more where
        layers are checkpointed."""
        if self.needs is None:
            return self.seconds
        again = all(layer.checkpointed for layer in self.needs.layers)
        products = self.rows * self.needs.flops / (PRODUCTS * self.speeds.forward)
        return products + self.seconds * (1 + again / (1 + BACKWARD_FLOPS))

    @property
    def memory(self) -> Memory | None:
        """The peak of one GPU with FSDP2 over the group's ranks, fp32 weights, AdamW and activations in bf16."""
        return None if self.needs is None else predict(self.needs, self.share())

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. Seconds, bytes, rows."""
        memory = self.memory
        return {
            "device": self.device,
            "device_bytes": self.device_bytes,
            "world_size": self.world_size,
            "ranks_per_node": self.ranks_per_node,
            "rows": self.rows,
            "cuts": self.cuts,
            "planned_for": self.planned_for,
            "attention_seconds": self.seconds,
            "attention": [asdict(site) for site in self.attention],
            "memory": None if memory is None else {**memory.parts, "peak": memory.peak, "at": memory.at},
        }

    def of_all_layers(self, layers: Sequence[int]) -> Target:
        """The same for a model of which each layer is like one of these: `layers` holds its number, layer by layer.
        Nothing is said of memory where the graph's layers are fewer than these."""
        if self.needs is None or max(layers) >= len(self.needs.layers):
            return replace(self, needs=self.needs if len({*layers}) == len(layers) else None)
        kept = len(self.needs.layers)
        counts = [layers.count(i % kept) for i in range(len(self.attention))]
        fits = len(self.attention) == kept
        sites = [
            replace(site, layers=n if fits else round(len(layers) / kept))
            for site, n in zip(self.attention, counts, strict=True)
        ]
        needs = replace(self.needs, layers=tuple(self.needs.layers[i] for i in layers))
        return replace(self, attention=tuple(sites), needs=needs)

    def __str__(self) -> str:
        nodes = self.nodes
        lines = [
            f"machine   {self.world_size} × {self.device} on {nodes} node{'s' * (nodes > 1)}: attention "
            f"{1e3 * self.seconds:.1f} ms a step, forward and backward"
        ]
        lines += [f"          later batches are planned for {self.planned_for}"] if self.planned_for else []
        for site, count in _folded(self.attention):
            others = ", ".join(f"{n} {1e3 * s:.2f}" for n, s in site.seconds.items() if n != site.exchange)
            across = f", {_mib(site.across)} of it from other nodes" if nodes > 1 else ""
            lines.append(
                f"          {count} × {site.mask}: {1e3 * site.seconds[site.exchange]:.2f} ms by {site.exchange} "
                f"({others}); imbalance {site.imbalance:.3f}; a rank gets up to {_mib(site.inside + site.across)} of "
                f"keys and values{across}"
            )
        if (memory := self.memory) is not None and self.needs is not None:
            lines.append(f"memory    {memory} of {amount(self.room)}: {self.verdict(memory.peak)}")
            whole = predict(self.needs, replace(self.share(), resharded=False))
            if self.world_size > 1 and memory.peak < whole.peak <= self.room:
                lines.append(f"          {amount(whole.peak)} with parallelize(reshard_after_forward=False): fits, too")
        return "\n".join(lines)


_CAPABILITIES: Mapping[str, tuple[int, int] | None] = {
    "b200": (10, 0), "b300": (10, 3), "h200": (9, 0), "h100": (9, 0), "a100": (8, 0), "cpu": None
}  # fmt: skip

_INSTALLED = frozenset({"flash_attn.cute", "fla.ops.cp"})


def facts_of(state: State) -> tuple[str, DeviceFacts] | None:
    """The name of the machine that a dry run is for, and what kernels ask of it, with FlashAttention 4 and fla
    installed. None: the graph runs here, or nothing is known of that machine."""
    name = target_speeds(state.sharding, state.device).name
    for known, capability in _CAPABILITIES.items() if is_dry_run(state) else ():
        if known in name.lower():
            return name, DeviceFacts(capability, _INSTALLED if capability else frozenset())
    return None


def target_of(state: State, needs: Needs | None) -> Target:
    """The target of a graph whose sites are decided."""
    speeds, ranks = target_speeds(state.sharding, state.device), state.sharding.world_size
    per_node = state.sharding.node_size or ranks
    asked, sites = state.sharding.exchange, list[Attention]()
    plan, planned_for = state.plan.plan, _planned_for(state)
    for decision in state.decisions:
        spec = spec_of(decision.site, deterministic=False)
        model = Model((spec.heads, spec.heads_kv), spec.head_dim)
        load = load_of(plan.schedule(decision.site.mask))
        inner = inner_ranks(state.sharding, spec.heads_kv)
        grids = {n: load_of(outer_schedule(plan, decision.site.mask, n)) for n in inner}
        seconds = exchange_seconds(load, speeds, model, per_node, grids) if ranks > 1 else {}
        if ranks == 1:
            seconds = {"local": exchange_seconds(load, speeds, model, 1)["needed"]}
        if "push" in seconds:  # what `needed` becomes inside of a node
            seconds["needed"] = min(seconds["needed"], seconds.pop("push"))
        chosen = asked if asked in seconds else min(seconds, key=seconds.__getitem__)
        moved = needed_bytes(load, model, per_node)
        if chosen.startswith("a2a") and chosen != "a2a":
            moved = scattered_bytes(load, grids[part_of(chosen) or max(grids)], model, per_node)
        sites.append(
            Attention(
                mask=str(decision.site.mask),
                layers=1,
                seconds=seconds,
                exchange=chosen,
                imbalance=imbalance(load.tiles),
                inside=int(moved[0].max()),
                across=int(moved[1].max()),
                expanded=int(load.expanded.max()),
            )
        )
    rows = plan.local_size * len(plan.rows)
    steps = (step.run for lowered in state.locality.lowered for step in lowered.steps)
    cuts = max((state.plan.most_cut(run.states) for run in steps if isinstance(run, OnPieces)), default=0)
    return Target(
        speeds.name,
        speeds.device_bytes,
        ranks,
        per_node,
        rows,
        tuple(sites),
        needs,
        planned_for,
        cuts,
        state.sharding.tile,
        speeds,
    )


def _planned_for(state: State) -> str:
    """The attention that later batches are planned for, once the graph is compiled."""
    sharding = state.sharding
    most = most_of(state.decisions, sharding.balanced_mask)
    if most is None or sharding.world_size == 1 or sharding.layout != "balanced":
        return ""
    options = sharding.layout_options(replace(most[0], exchange=between_gpus(most[0].exchange, state)))
    narrow = "; narrower rows that travel count as key heads" if any(each.cut for each in state.decisions) else ""
    return f"{SiteKind(options.model, options.exchange)}{narrow}"


def _folded(sites: Sequence[Attention]) -> list[tuple[Attention, int]]:
    """Equal sites as one, with how many layers have it."""
    counts: dict[str, tuple[Attention, int]] = {}
    for site in sites:
        key = repr(replace(site, layers=1))
        counts[key] = site, site.layers + counts.get(key, (site, 0))[1]
    return [*counts.values()]


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
