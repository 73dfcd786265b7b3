"""Decide for each site which exchange moves its keys and which kernel runs it. Pure: equal on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor

from cp_rewrite.batch.trace import Traffic
from cp_rewrite.kernels.peers import group_reasons, row_reasons
from cp_rewrite.kernels.select import AttentionSpec, choose_kernel, device_facts
from cp_rewrite.masks import PackedMask
from cp_rewrite.ops.attention import travels_beside
from cp_rewrite.ops.scatter_heads import HeadScatter
from cp_rewrite.passes.graph.nodes import graph_modules, guard_number, region_calls
from cp_rewrite.passes.values.state import Decision, Site, State
from cp_rewrite.planning.choose_exchange import ExchangeChoice, choose_exchange, typical_load
from cp_rewrite.planning.cost.constants import FEW_TOKENS, TOKENS_PER_RANK
from cp_rewrite.planning.cost.devices import DEVICES, Device, Model, SiteKind
from cp_rewrite.planning.cost.load import Load, load_of
from cp_rewrite.planning.names import ExchangeName, over_part, split_exchange
from cp_rewrite.planning.routes.by_exchange import BETWEEN_GPUS, ROUTES, Exchange
from cp_rewrite.planning.routes.grid import inner_sizes, outer_schedule
from cp_rewrite.planning.routes.head_deal import HeadDeal
from cp_rewrite.planning.routes.route import fits
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.sharding import Sharding, speeds_of

_EXCHANGES: tuple[str, ...] = tuple(name for name in get_args(ExchangeName) if name != "auto")


def plan_sites(state: State) -> State:
    """One Decision per site, or a Refusal that holds every reason."""
    decisions: list[Decision] = []
    refusals: list[Refusal] = []
    for site in state.sites:
        decision = decide(site, state)
        if isinstance(decision, Refusal):
            refusals.append(decision)
        else:
            decisions.append(decision)
    return replace(state, decisions=tuple(decisions), refusals=state.refusals + tuple(refusals))


def decide(site: Site, state: State, named: str = "asked for") -> Decision | Refusal:
    """How a site will run, or what stands against it. named: why its exchange is the one that the annotation names."""
    spec = spec_of(site, state.sharding.deterministic)
    if state.sharding.capacity is not None and not fits(site.mask):
        return Refusal(Reason.CAPACITY, "documents' ends clip the window on its right side", site.node)
    if state.sharding.max_logits and _in_shared_region(site, state):
        return Refusal(
            Reason.NESTED_REGION, "several calls share its region: max_logits can't tell them apart", site.node
        )
    name, why = _exchange_name(site, spec, state, named)
    if against := exchange_reasons(name, state.sharding):
        return Refusal(Reason.EXCHANGE, f"{name}: {'; '.join(against)}", site.node)
    exchange, heads = ranks_of(name, (spec.heads, spec.heads_kv), (spec.head_dim, spec.head_dim_v), state.sharding)
    if heads is not None:
        why, spec = f"{why}; {heads.deal}", replace(spec, heads=heads.deal.local, heads_kv=heads.deal.local_kv)
    if state.target is not None and state.target.capability is not None:  # models train in half precision on GPUs
        spec = replace(spec, dtype=torch.bfloat16 if spec.dtype == torch.float32 else spec.dtype)
    choice = choose_kernel(spec, state.target or device_facts(state.device), state.sharding.kernel)
    if choice.kernel is None:
        return Refusal(Reason.KERNEL, str(choice), site.node)
    if name in BETWEEN_GPUS.values():
        why += " beside the kernel" if travels_beside(exchange, choice.kernel) else " before and after the kernel"
    rejected = tuple(f"not {other}: {'; '.join(reasons)}" for other, reasons in choice.rejected)
    return Decision(site, name, exchange, heads, choice.kernel, (f"{name}: {why}", *rejected))


def _in_shared_region(site: Site, state: State) -> bool:
    """True if a site is in a region that runs more than once, or in one inside of it."""
    shared = [region.owning_module for region, calls in region_calls(state.graph_module).items() if len(calls) > 1]
    return any(site.graph_module in graph_modules(module) for module in shared)


def ranks_of(
    name: str, heads: tuple[int, int], dims: tuple[int, int], sharding: Sharding
) -> tuple[Exchange, HeadScatter | None]:
    """Between which ranks rows travel under an exchange, and between which heads are scattered before, if they are.

    Args:
        heads: of queries, and of keys and values. dims: D and V.
    """
    scattered, kind = split_exchange(name)
    if not scattered:
        return Exchange(kind, sharding.group_name if sharding.world_size > 1 else "", sharding.world_size), None
    (outer, inner), (outer_group, inner_group) = sharding.grid_size(name), sharding.grid_groups(name)
    exchange = Exchange(kind, "" if kind == "local" else outer_group, outer)
    return exchange, HeadScatter(HeadDeal.best(*heads, inner), dims, inner_group)


def exchange_reasons(name: str, sharding: Sharding) -> list[str]:
    """Every reason why an exchange can't serve these ranks; empty: it can."""
    scattered, kind = split_exchange(name)
    route = ROUTES[kind]
    found: list[str] = []
    if scattered and kind != "local" and not sharding.most_inner:
        found.append("heads are scattered over the last of two dims of a mesh, or inside of nodes: there is one node")
    if sharding.capacity is not None and (scattered or route.fixed is None):
        found.append(
            "with capacity, rows travel by all_gather, or by needed where GPUs read each other's memory: the host must "
            "not know how many"
        )
    if sharding.exchange_at == "narrowest" and (scattered or route.in_steps or sharding.capacity is not None):
        found.append("exchange_at='narrowest' is for all_gather and needed, without capacity")
    if sharding.keep_kv and route.in_steps:
        found.append("a ring holds no more than two buffers of keys and values, so keep_kv=True has nothing to keep")
    return found


def spec_of(site: Site, deterministic: bool) -> AttentionSpec:
    """The spec of the kernel that the site asks for."""
    query, value = (node.meta["example_value"] for node in (site.query, site.value))
    out: Tensor = site.node.meta["example_value"]
    return AttentionSpec(
        dtype=out.dtype,
        head_dim=guard_number(query.shape[-1]),
        head_dim_v=guard_number(value.shape[-1]),
        heads=guard_number(site.heads_of(site.query)),
        heads_kv=guard_number(site.heads_of(site.key)),
        causal=not site.mask.looks_ahead,
        needs_backward=out.requires_grad,
        deterministic=deterministic,
        softcap=site.softcap,
    )


def traffic_of(decision: Decision) -> Traffic:
    """The bytes that a site moves for each token, for traces of a run."""
    spec = spec_of(decision.site, deterministic=False)
    keys, queries = spec.heads_kv * (spec.head_dim + spec.head_dim_v), spec.heads * (spec.head_dim + spec.head_dim_v)
    item = spec.dtype.itemsize
    return Traffic(decision.site.mask, decision.exchange_name, item * keys, item * queries)


def model_of(decision: Decision) -> Model:
    """The sizes of a site's attention. Of rows that are narrower than keys and values: with as many key heads as have
    their bytes."""
    spec = spec_of(decision.site, deterministic=False)
    dim, item = (spec.head_dim + spec.head_dim_v) // 2, spec.dtype.itemsize
    rows = decision.cut and -(-decision.cut.row_bytes // (2 * dim * item))
    return Model((spec.heads, rows or spec.heads_kv), dim, item)


def most_of(decisions: Sequence[Decision], mask: PackedMask) -> tuple[SiteKind, int] | None:
    """How most attention of a graph runs, and how many columns of queries its sites have; where there are sites of this
    mask, of these. None: there is no attention."""
    columns: Counter[SiteKind] = Counter()
    for decision in [each for each in decisions if each.site.mask == mask] or decisions:
        model = model_of(decision)
        columns[SiteKind(model, decision.exchange_name)] += model.heads[0] * model.head_dim
    return columns.most_common(1)[0] if columns else None


def _exchange_name(site: Site, spec: AttentionSpec, state: State, named: str) -> tuple[str, str]:
    """(name of the exchange, why). named: why, where the annotation names it."""
    sharding = state.sharding
    if sharding.world_size == 1:
        return "local", "one rank: nothing moves"
    exchange, why = sharding.exchange, named
    captured = exchange == "auto" and sharding.capacity is not None
    if captured:
        exchange, why = "needed", "capacity is set"
    against = _unless_one_sided(spec, state) if exchange == "auto" or exchange in BETWEEN_GPUS else None
    if exchange == "auto":
        choice = _cheapest(site, spec, state, one_sided=against == [] or would_be_one_sided(state))
        exchange, why = choice.exchange, choice.reason
        if against is None:  # what carries it out is chosen between GPUs only
            exchange = next((name for name, out in BETWEEN_GPUS.items() if out == exchange), exchange)
    carried_out = BETWEEN_GPUS.get(exchange, exchange)
    if carried_out in BETWEEN_GPUS.values() and against is not None:
        if not against:
            return carried_out, f"{why}; rows are written into the peers' memory"
        why += f"; not into the peers' memory, since {'; '.join(against)}"
    return "all_gather" if captured else exchange, why


def _cheapest(site: Site, spec: AttentionSpec, state: State, one_sided: bool) -> ExchangeChoice:
    """The exchange that takes least for this batch, or, where it has few tokens, for a typical one."""
    sharding = state.sharding
    item = min(2, spec.dtype.itemsize) if is_dry_run(state) else spec.dtype.itemsize
    model = Model((spec.heads, spec.heads_kv), spec.head_dim, item)
    speeds = target_speeds(sharding, state.device)
    load = load_for(site, state)
    grids = {inner: _places(inner, site, state) for inner in inner_ranks(sharding, spec.heads_kv)}
    names = [name for name in _EXCHANGES if not exchange_reasons(name, sharding)]
    parts = [over_part(name, n) for n in grids for name in names if name.startswith("a2a+") and n < sharding.most_inner]
    names += parts
    names = [BETWEEN_GPUS.get(name, name) if one_sided else name for name in names]
    return choose_exchange(model, load, speeds, names, sharding.node_size, grids)


def inner_ranks(sharding: Sharding, heads_kv: int) -> tuple[int, ...]:
    """Over how many ranks `a2a+…` may scatter heads; what a mesh's last dim says is all."""
    most = sharding.most_inner
    flat = isinstance(sharding.mesh, int) or sharding.mesh.ndim == 1
    return (inner_sizes(most, heads_kv) if flat else (most,)) if most > 1 else ()


def _places(inner: int, site: Site, state: State) -> Load:
    """The load of places of `inner` ranks for this batch, or, where it has few tokens, for a typical one."""
    if _is_known(state):
        return load_of(outer_schedule(state.plan.plan, site.mask, inner))
    return typical_load(state.sharding.world_size // inner, site.mask, inner * TOKENS_PER_RANK)


def target_speeds(sharding: Sharding, device: torch.device) -> Device:
    """The speeds of the machine that is planned for: the annotation's, the device's, or, in a dry run without a GPU,
    those of an H200."""
    if sharding.device_speeds is None and _is_dry(sharding, device):
        return DEVICES["h200"]
    return sharding.device_speeds or speeds_of(device)


def _is_dry(sharding: Sharding, device: torch.device) -> bool:
    return isinstance(sharding.mesh, int) and device.type == "cpu"


def is_dry_run(state: State) -> bool:
    """True if a dry run looks at the graph for another machine, where its activations will be in bf16."""
    return _is_dry(state.sharding, state.device)


def would_be_one_sided(state: State) -> bool:
    """True if the GPUs that a dry run is for share one node, and so each other's memory."""
    sharding = state.sharding
    gpus = is_dry_run(state) and target_speeds(sharding, state.device).name != "cpu"
    return gpus and (sharding.node_size or sharding.world_size) >= sharding.world_size


def between_gpus(name: str, state: State) -> str:
    """The exchange that carries this one out on the machine that is planned for."""
    return BETWEEN_GPUS.get(name, name) if would_be_one_sided(state) else name


def _is_known(state: State) -> bool:
    """True if the batch that is compiled has so many tokens that others will be like it."""
    return len(state.plan.plan.rows) * state.plan.plan.local_size >= FEW_TOKENS


def load_for(site: Site, state: State) -> Load:
    """The load that exchanges are weighed by: of this batch, or, where it has few tokens, of a typical one."""
    if _is_known(state):
        return load_of(state.plan.plan.schedule(site.mask))
    return typical_load(state.sharding.world_size, site.mask)


def _unless_one_sided(spec: AttentionSpec, state: State) -> list[str] | None:
    """Why ranks can't write rows into each other's memory; empty: they can. None: there are no GPUs."""
    if state.device.type != "cuda" or isinstance(state.sharding.mesh, int):
        return None
    columns = (spec.heads_kv * spec.head_dim, spec.heads_kv * spec.head_dim_v)
    return [*row_reasons(spec.dtype, *columns), *group_reasons(state.sharding.group_name)]
