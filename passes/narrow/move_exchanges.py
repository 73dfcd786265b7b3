"""Exchange what keys and values are computed from, where that is narrower and takes less time. Pure: equal on all
ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch.fx as fx

from cp_rewrite.passes.graph.modes import modes_of
from cp_rewrite.passes.graph.regions import region_calls
from cp_rewrite.passes.locality.inputs import read_extents
from cp_rewrite.passes.plan_sites import between_gpus, decide, load_for, model_of, target_speeds
from cp_rewrite.passes.values.cut import Cut
from cp_rewrite.passes.values.state import Decision, State
from cp_rewrite.planning.cost.constants import EXPANDED_PASSES, NARROW_GAIN, NARROW_PASSES
from cp_rewrite.planning.cost.devices import Device, Model
from cp_rewrite.planning.cost.load import Load, kernel_seconds
from cp_rewrite.planning.cost.seconds import exchange_seconds, fill_seconds
from cp_rewrite.planning.routes.gathered import all_gather_seconds
from cp_rewrite.planning.routes.needed import needed_seconds
from cp_rewrite.torch_internals import fake_mode_of

from .find_cut import Costs, find_cut
from .read_way import GraphOrder, ReadWay

MOVABLE = ("needed", "push", "all_gather")
"""Exchanges before the kernel: rows are at hand when it starts."""


def move_exchanges(state: State) -> State:
    """A cut for each decision that gains by one."""
    mode = fake_mode_of(state.graph_module.graph.nodes)
    extents = None if mode is None else read_extents(state.tokens, mode.shape_env)
    if state.sharding.exchange_at == "attention" or state.refusals or extents is None:
        return state
    changed, order_of = frozenset((*state.locality.changed(), *(site.node for site in state.sites))), cache(GraphOrder)
    outside_autocast = cache(partial(_outside_autocast, root=state.graph_module))

    def way_to(node: fx.Node) -> ReadWay | None:
        """None: nothing can be computed again where an autocast is open around the graph."""
        if not outside_autocast(node.graph):
            return None
        return ReadWay(node, order_of(node.graph), state.locality.states, extents, changed)

    return replace(state, decisions=tuple(_moved(decision, state, way_to) for decision in state.decisions))


def _moved(decision: Decision, state: State, way_to: Callable[[fx.Node], ReadWay | None]) -> Decision:
    site, sharding = decision.site, state.sharding
    movable = _movable(decision, state)
    if movable is None:
        return decision
    device = target_speeds(sharding, state.device)
    load, model = load_for(site, state), model_of(decision)
    forced = sharding.exchange_at == "narrowest"
    name = between_gpus(decision.exchange_name, state)
    before = exchange_seconds(load, device, model, sharding.node_size).get(name)
    kernel = kernel_seconds(load.tiles.max(), load.launches, device, model)
    if not forced and (before is None or kernel > NARROW_GAIN * before):  # no cut takes less than the kernel
        return decision
    way = way_to(site.node)
    if way is None:
        return decision
    cut = find_cut(site, way, Costs(1e-9, 0.0, 0.0) if forced else costs_of(load, device))
    if cut is None:
        why = "nothing narrower than keys and values is at hand to exchange"
        return replace(decision, why=(*decision.why, why)) if forced else decision
    after = _seconds(movable.exchange.kind, load, device, model, sharding.node_size, cut)
    if before is not None and not forced and after > NARROW_GAIN * before:
        return decision
    against = "" if before is None else f", {1e3 * before:.2f} with keys and values by {decision.exchange_name}"
    return replace(movable, cut=cut, why=(*movable.why, f"{cut}; predicted {1e3 * after:.2f} ms per layer{against}"))


def _movable(decision: Decision, state: State) -> Decision | None:
    """The decision, or, where the exchange was not asked for by name, one whose rows are at hand when the kernel
    starts."""
    if state.sharding.capacity is not None or state.sharding.world_size == 1 or decision.site.form in ("HTD", "BTD"):
        return None
    if decision.exchange.kind in MOVABLE and decision.heads is None:
        return decision
    mesh = state.sharding.mesh
    if state.sharding.exchange != "auto" or not (isinstance(mesh, int) or mesh.ndim == 1):
        return None
    needed = replace(state, sharding=replace(state.sharding, exchange="needed"))
    other = decide(decision.site, needed, named="for rows that are narrower than keys and values")
    return other if isinstance(other, Decision) else None


def _outside_autocast(graph: fx.Graph, root: fx.GraphModule) -> bool:
    """Whether no autocast of a graph around this one is open where it runs: its nodes' dtypes are read from itself."""
    calls = region_calls(root)
    for call in calls.get(graph, ()):
        open_there = modes_of(call.graph)[call][0]
        if open_there or not _outside_autocast(call.graph, root):
            return False
    return True


def costs_of(load: Load, device: Device) -> Costs:
    """For one row that a rank computes again, of those beyond its own."""
    received, expanded = float(load.received.sum(1).max()), max(1.0, float(load.expanded.max()))
    more = max(0.0, expanded - load.local_rows)
    return Costs(
        byte=(3 * received / device.link + EXPANDED_PASSES * expanded / device.memory) / expanded,
        flop=(1 / device.forward + 2 / device.backward) * more / expanded,
        written=NARROW_PASSES / device.memory * more / expanded,
    )


def _seconds(kind: str, load: Load, device: Device, model: Model, per_node: int | None, cut: Cut) -> float:
    """One layer's attention, forward and backward: the exchange of the cut's rows, what is computed again of them, and
    the kernel."""
    in_turn = all_gather_seconds if kind == "all_gather" else needed_seconds
    narrow = Model((1, 1), -(-cut.row_bytes // (2 * model.item_bytes)), model.item_bytes)
    exchange = in_turn(load, device, narrow, per_node or load.world_size)
    exchange -= kernel_seconds(load.tiles.max(), load.launches, device, narrow)
    costs, expanded = costs_of(load, device), float(load.expanded.max())
    again = expanded * (costs.flop * cut.flops + costs.written * cut.kv_bytes)
    kernel = kernel_seconds(load.tiles.max(), load.launches, device, model)
    return exchange + again + kernel + fill_seconds(load, device, model)
