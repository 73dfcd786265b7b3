"""What passes hand on: one frozen value per stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from cp_rewrite.batch.active.plan import ActivePlan
from cp_rewrite.kernels.select import DeviceFacts
from cp_rewrite.ops.scatter_heads import HeadScatter
from cp_rewrite.passes.graph.dynamo_frame import Results
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.planning.plan_input import PlanInput
from cp_rewrite.planning.routes.by_exchange import Exchange
from cp_rewrite.refusal import Refusal
from cp_rewrite.sharding import Sharding

from .cut import Cut
from .left_out import LeftOut
from .locality import Locality
from .recorded_mask import RecordedMask
from .site import Site
from .sizes import SizeConditions
from .table import Table


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
        """What is read by what takes the node's place."""
        if self.cut is None:
            return self.site.operands
        others = [node for node in self.site.operands if node not in (self.site.key, self.site.value)]
        return [*others, *self.cut.operands]


@dataclass(frozen=True)
class Frame:
    """What Dynamo says of the function that a graph was captured from.

    Args:
        kept: nodes whose values outlive the call by another way than its result -> what keeps them (`L['self'].load`).
        breaks: the line where the graph ends before the function does, and why; None: it does not.
        resumed: the graph begins in the middle of the function.
        places: of `kept` among the graph's outputs.
        results: what the function returns and keeps, to be asked for while it is compiled; None: that can't be told.
    """

    kept: Mapping[fx.Node, str]
    places: frozenset[int]
    breaks: str | None
    resumed: bool
    results: Callable[[], Results | None]


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
