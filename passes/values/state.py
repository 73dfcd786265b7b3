"""Frozen values that passes hand on, from the sites of a graph to the `State` that holds them all.

Site                             attention that matching finds
TokenRows, Cut                   rows that travel in the place of keys and values, and what each rank then computes
RecordedTensor, RecordedMask     a mask's computation, which outlives its graph
Table                            a buffer that masks were proven by
LeftOut                          a wide output that a graph no longer gives
Decision                         how a site will run
Frame                            facts from Dynamo about the function
State                            a captured graph on its way through the passes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from cp_rewrite.batch.active import ActivePlan
from cp_rewrite.kernels.select import DeviceFacts
from cp_rewrite.masks import MaskMismatch, PackedMask
from cp_rewrite.ops.scatter_heads import HeadScatter
from cp_rewrite.ops.tiles import Region
from cp_rewrite.passes.graph.canonicalize import Canonical, Ref
from cp_rewrite.passes.graph.tokens import Size, TokenAxis
from cp_rewrite.planning.plan_input import PlanInput
from cp_rewrite.planning.routes.by_exchange import Exchange
from cp_rewrite.refusal import Refusal
from cp_rewrite.sharding import Sharding

from .edits import Locality
from .sizes import SizeConditions


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
        """Nodes that the attention in the node's place reads."""
        return [self.query, self.key, self.value, *([] if self.sinks is None else [self.sinks])]


@dataclass(frozen=True)
class TokenRows:
    """A tensor with one row for each local row.

    Args:
        node: its node. token: the dim that counts tokens. columns: elements of a row.
    """

    node: fx.Node
    token: int
    columns: int


@dataclass(frozen=True)
class Cut:
    """Where on the way to attention rows are exchanged, when not at keys and values.

        c -> up-projection -> k, v          rows: c          nodes: up-projection, k, v

    Args:
        rows: what travels.
        nodes: what is computed again of the rows that came, in the graph's order; keys and values are among them or
            among `rows`.
        numbers: what `nodes` read that is no tensor -> a TokenCount of other rows, or it as it is; or a tuple of
            them.
        autocasts: arguments of those that are open there.
        row_bytes: of a token in `rows`. kv_bytes: of its keys and values. flops: of `nodes`, forward, for one token.
    """

    rows: tuple[TokenRows, ...]
    nodes: tuple[fx.Node, ...]
    numbers: Mapping[fx.Node, Any]
    autocasts: tuple[Any, ...]
    row_bytes: int
    kv_bytes: int
    flops: int

    @property
    def operands(self) -> list[fx.Node]:
        """Nodes that are read of the rest of the graph: rows that travel, weights."""
        inside = set(self.nodes)
        read = [source for node in self.nodes for source in node.all_input_nodes if source not in inside]
        return [*dict.fromkeys([*(rows.node for rows in self.rows), *read])]

    def __str__(self) -> str:
        names = ", ".join(rows.node.name for rows in self.rows)
        return (
            f"rows of {names} travel, {self.row_bytes} bytes a token for the {self.kv_bytes} of keys and values, which "
            f"each rank computes of them again: {self.flops / 1e6:.3g} MFLOP a row"
        )


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


@dataclass(frozen=True)
class Table:
    """A buffer (…, N, N) of a module that holds a number for each pair of places, where a causal model keeps its
    triangle: its entry [..., i, j] is `inside` where low <= i - j <= high, else `outside`; or one of any shape that
    holds one number.

    Args:
        name: the buffer's. low, high: None: no such bound. Longer rows than N are no question here: the graph has
            compared their tokens with N.
    """

    name: str
    inside: float
    outside: float
    low: int | None = None
    high: int | None = None
    _seen: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]], compare=False)

    @staticmethod
    @torch.no_grad()
    def read(name: str, buffer: Tensor) -> Table | None:
        """The table that a buffer's numbers make; None where they make none.

        1 0 0 0
        1 1 0 0      by distance i - j = -3 … 3:   0 0 0 1 1 0 0      low 0, high 1
        0 1 1 0
        0 0 1 1
        """
        unknown = hasattr(buffer, "_cp_rewrite_unknown")  # a model on `meta` in a dry run
        if (
            unknown
            or type(buffer) not in (Tensor, nn.Buffer)
            or buffer.is_meta
            or buffer.is_complex()
            or not buffer.numel()
        ):
            return None
        seen, first = [_place_of(buffer)], buffer.flatten()[0]
        if bool((buffer == first).all()):
            return Table(name, float(first), float(first), _seen=seen)
        size = buffer.shape[-1]
        if buffer.ndim < 2 or buffer.numel() != size**2 or buffer.shape[-2] != size:
            return None
        table = buffer.reshape(size, size)
        if not bool((table[1:, 1:] == table[:-1, :-1]).all()):
            return None
        by_distance = torch.cat([table[0].flip(0), table[1:, 0]]).double().cpu()
        kept = by_distance == by_distance[size - 1]
        places, others = kept.nonzero().flatten().tolist(), by_distance[~kept].unique()
        if not places or places[-1] - places[0] + 1 != len(places) or len(others) != 1:
            return None
        low = None if places[0] == 0 else places[0] - (size - 1)
        high = None if places[-1] == 2 * size - 2 else places[-1] - (size - 1)
        return Table(name, float(by_distance[size - 1]), float(others[0]), low, high, seen)

    def check(self, buffer: Tensor) -> None:
        """Raise unless the buffer still says what it said.

        It is read again where it was written to, or is another. Writes past autograd (`.data`, `.numpy()`) leave no
        trace: its numbers are compared in every call, with a table that equal ones share. On a GPU nothing waits for
        that: the comparison asserts there.
        """
        place = _place_of(buffer)
        changed = f"{self.name} was proven as a mask by its numbers, and holds others now: torch.compiler.reset()"
        if place not in self._seen:
            if Table.read(self.name, buffer) != self:
                raise MaskMismatch(changed)
            self._seen[:] = [place]
            return
        if buffer.is_cuda:
            torch._assert_async((buffer.detach() == self._expected(buffer)).all(), changed)
        elif not torch.equal(buffer.detach(), self._expected(buffer)):
            raise MaskMismatch(changed)

    def _expected(self, buffer: Tensor) -> Tensor:
        """The numbers that a buffer of this table holds, in the buffer's shape and dtype."""
        return _expected(self.inside, self.outside, self.low, self.high, buffer.shape, buffer.dtype, buffer.device)


@lru_cache(maxsize=8)  # layers have equal tables
def _expected(
    inside: float,
    outside: float,
    low: int | None,
    high: int | None,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    if inside == outside:
        return torch.full(shape, inside, dtype=dtype, device=device)
    size = shape[-1]
    place = torch.arange(size, device=device)
    distance = place[:, None] - place
    kept = (distance >= (-size if low is None else low)) & (distance <= (size if high is None else high))
    numbers = torch.tensor([inside, outside], dtype=torch.float64).to(device, dtype)
    return torch.where(kept, numbers[0], numbers[1]).expand(shape).contiguous()


def _place_of(buffer: Tensor) -> tuple[int, int]:
    """(address, version): one changes where a tensor is another one, or was written to."""
    return buffer.data_ptr(), -1 if buffer.is_inference() else buffer._version


@dataclass(frozen=True)
class LeftOut:
    """A wide output that a graph no longer gives, and how it is made of what the graph gives in its place.

    Args:
        place: its place among the outputs, where None is given. region: what makes it, over some rows at a time.
        operands: the region's: inputs of the graph, or places among all that the graph gives. orders: of their dims,
            as the region takes them.
        order: the dims of the output as the region gives them. sizes: of these dims; None: of the one that counts rows.
        trained: gradients reach it.
    """

    place: int
    region: Region
    operands: tuple[fx.Node | int, ...]
    orders: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    sizes: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device
    trained: bool
    tile: int


@dataclass(frozen=True)
class Decision:
    """How one site will run.

    Args:
        exchange_name: as reports say it: `push`, `a2a+p2p`.
        exchange: how rows travel, after heads are scattered. heads: between whom heads are, if they are.
        kernel: what runs.
        why: how exchange and kernel were chosen, in words for the report.
        cut: where on the way to keys and values rows are exchanged; None: at these.
    """

    site: Site
    exchange_name: str
    exchange: Exchange
    heads: HeadScatter | None
    kernel: str
    why: tuple[str, ...]
    cut: Cut | None = None

    @property
    def node(self) -> fx.Node:
        """The attention node."""
        return self.site.node

    @property
    def operands(self) -> list[fx.Node]:
        """Nodes that are read by what takes the node's place."""
        if self.cut is None:
            return self.site.operands
        others = [node for node in self.site.operands if node not in (self.site.key, self.site.value)]
        return [*others, *self.cut.operands]


@dataclass(frozen=True)
class Frame:
    """Facts from Dynamo about the function that a graph was captured from.

    Args:
        kept: nodes whose values outlive the call by another way than its result -> what keeps them (`L['self'].load`).
        breaks: the line where the graph ends before the function does, and why; None: it does not.
        resumed: the graph begins in the middle of the function.
        places: of `kept` among the graph's outputs.
    """

    kept: Mapping[fx.Node, str]
    places: frozenset[int]
    breaks: str | None
    resumed: bool


@dataclass(frozen=True)
class State:
    """A captured graph on its way through the passes.

    Args:
        graph_module: the graph; only `rewrite` mutates it.
        sharding: the annotation.
        tokens: which inputs carry tokens, and the names of all.
        device: where the graph runs. target: of a dry run what is known of the GPUs that it is for.
        plan: of the batch in flight; the extra inputs take their sizes from it.
        frame: what Dynamo says of the function. loss_alone: its caller reads none of its outputs beside a loss.
        chunked: loops over chunks of tokens were made one run over all of them.
        size_conditions: what the graph decided by token counts.
        sites, locality, refusals: what was found. refused: other attention nodes -> the Site that each would be, but
            for its mask, where its operands fit.
        tables: buffers whose numbers masks were proven by. offsets: arguments that must hold what the packing's
            cu_seqlens do.
        decisions: what was decided. inputs: what was added, in order. masks: what will be compared on the first call.
        left_out: outputs that the graph no longer gives.
    """

    graph_module: fx.GraphModule
    sharding: Sharding
    tokens: TokenAxis
    device: torch.device
    plan: ActivePlan
    frame: Frame
    loss_alone: bool = False
    target: DeviceFacts | None = None
    chunked: bool = False
    size_conditions: SizeConditions | None = None
    sites: tuple[Site, ...] = ()
    refused: Mapping[fx.Node, Site | None] = field(default_factory=dict[fx.Node, Site | None])
    tables: Mapping[fx.Node, Table] = field(default_factory=dict[fx.Node, Table])
    offsets: Mapping[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    locality: Locality = field(default_factory=Locality)
    refusals: tuple[Refusal, ...] = ()
    decisions: tuple[Decision, ...] = ()
    inputs: tuple[PlanInput, ...] = ()
    masks: tuple[RecordedMask, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
