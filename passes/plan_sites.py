"""Decide for each site which exchange moves its keys and which kernel runs it. Pure: equal on all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cp_rewrite.kernels.peers.reasons import group_reasons, row_reasons
from cp_rewrite.kernels.select import AttentionSpec, capabilities, choose_kernel, device_facts
from cp_rewrite.passes.values.site import Site
from cp_rewrite.passes.values.state import Decision, State
from cp_rewrite.planning.choose_exchange import choose_exchange
from cp_rewrite.planning.devices import Device, Model
from cp_rewrite.planning.routes import fixed
from cp_rewrite.planning.routes.head_deal import HeadDeal
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.sharding import Sharding, split_exchange


def plan_sites(state: State) -> State:
    """One Decision per site, or a Refusal that holds every reason."""
    decisions: list[Decision] = []
    refusals: list[Refusal] = []
    for site in state.sites:
        decision = _decide(site, state)
        if isinstance(decision, Refusal):
            refusals.append(decision)
        else:
            decisions.append(decision)
    return replace(state, decisions=tuple(decisions), refusals=state.refusals + tuple(refusals))


def _decide(site: Site, state: State) -> Decision | Refusal:
    spec = spec_of(site, state.sharding.deterministic)
    if state.sharding.capacity is not None and not fixed.fits(site.mask):
        return Refusal(Reason.CAPACITY, "documents' ends clip the window on its right side", site.node)
    exchange, why = _exchange(site, spec, state)
    if against := exchange_reasons(exchange, state.sharding):
        return Refusal(Reason.EXCHANGE, f"{exchange}: {'; '.join(against)}", site.node)
    if split_exchange(exchange)[0]:
        deal = HeadDeal.best(spec.heads, spec.heads_kv, state.sharding.grid[1])
        why, spec = f"{why}; {deal}", replace(spec, heads=deal.local, heads_kv=deal.local_kv)
    choice = choose_kernel(spec, device_facts(state.device), state.sharding.kernel)
    if choice.kernel is None:
        return Refusal(Reason.KERNEL, str(choice), site.node)
    if exchange == "push":
        why += " beside the kernel" if capabilities(choice.kernel).overlaps_exchange else " before and after the kernel"
    rejected = tuple(f"not {name}: {'; '.join(reasons)}" for name, reasons in choice.rejected)
    return Decision(site, exchange, choice.kernel, (f"{exchange}: {why}", *rejected))


def exchange_reasons(exchange: str, sharding: Sharding) -> list[str]:
    """Every reason why an exchange can't serve these ranks; empty: it can."""
    scattered, outer = split_exchange(exchange)
    found: list[str] = []
    if scattered and outer != "local" and isinstance(sharding.mesh, int):
        found.append("heads are scattered over one dim of a two-dimensional DeviceMesh, and this dry run has none")
    if sharding.capacity is not None and exchange not in fixed.EXCHANGES:
        found.append(
            "with capacity, rows travel by all_gather, or by needed where GPUs read each other's memory: the host must "
            "not know how many"
        )
    if sharding.keep_kv and outer == "p2p":
        found.append("a ring holds no more than two buffers of keys and values, so keep_kv=True has nothing to keep")
    return found


def spec_of(site: Site, deterministic: bool) -> AttentionSpec:
    """What the site asks of a kernel."""
    query, key, value = (node.meta["example_value"] for node in (site.query, site.key, site.value))
    out: Tensor = site.node.meta["example_value"]
    window = site.mask.window or (None, None)
    return AttentionSpec(
        dtype=out.dtype,
        head_dim=int(query.shape[-1]),
        head_dim_v=int(value.shape[-1]),
        heads=int(query.shape[1]),
        heads_kv=int(key.shape[1]),
        causal=site.mask.causal,
        windowed=window[0] is not None or bool(window[1]),
        needs_backward=out.requires_grad,
        deterministic=deterministic,
        softcap=site.softcap,
    )


def _exchange(site: Site, spec: AttentionSpec, state: State) -> tuple[str, str]:
    """(exchange, why). `needed` travels by one-sided writes (`push`) where all ranks can map each other's memory."""
    sharding = state.sharding
    if sharding.world_size == 1:
        return "local", "one rank: nothing moves"
    exchange, why = sharding.exchange, "asked for"
    fixed = exchange == "auto" and sharding.capacity is not None
    if fixed:
        exchange, why = "needed", "capacity is set"
    elif exchange == "auto":
        model = Model((spec.heads, spec.heads_kv), spec.head_dim, spec.dtype.itemsize)
        speeds = sharding.device_speeds or _speeds(state.device)
        per_node = sharding.node_size
        choice = choose_exchange(model, sharding.world_size, site.mask, speeds, ranks_per_node=per_node)
        exchange, why = choice.exchange, choice.reason
    if exchange == "needed" and state.device.type == "cuda" and not isinstance(sharding.mesh, int):
        columns = (spec.heads_kv * spec.head_dim, spec.heads_kv * spec.head_dim_v)
        against = [*row_reasons(spec.dtype, *columns), *group_reasons(sharding.group_name)]
        if not against:
            return "push", f"{why}; rows are written into the peers' memory"
        why += f"; not into the peers' memory, since {'; '.join(against)}"
    return "all_gather" if fixed else exchange, why


def _speeds(device: torch.device) -> Device:
    """Measured speeds of the GPU that the name tells; an unknown one counts as an H100."""
    if device.type != "cuda":
        return Device.named("cpu")
    name = torch.cuda.get_device_name(device).lower()
    return Device.named(next((known for known in ("h200", "h100", "a100") if known in name), "h100"))
