"""Decide for each site which exchange moves its keys and which kernel runs it. Pure: equal on all ranks."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from cp_rewrite.kernels.select import AttentionSpec, choose, device_facts
from cp_rewrite.refusal import Reason, Refusal

from .sites import Site
from .state import Decision, State


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
    exchange, why = _exchange(state)
    if exchange is None:
        return Refusal(Reason.EXCHANGE, why, site.node)
    choice = choose(spec_of(site, state.sharding.deterministic), device_facts(state.device), state.sharding.kernel)
    if choice.kernel is None:
        return Refusal(Reason.KERNEL, str(choice), site.node)
    rejected = tuple(f"not {name}: {'; '.join(reasons)}" for name, reasons in choice.rejected)
    return Decision(site, exchange, choice.kernel, (f"{exchange}: {why}", *rejected))


def spec_of(site: Site, deterministic: bool) -> AttentionSpec:
    """What the site asks of a kernel."""
    query, key, value = (node.meta["example_value"] for node in (site.query, site.key, site.value))
    out: Tensor = site.node.meta["example_value"]
    window = site.mask.window or (None, None)
    return AttentionSpec(
        dtype=out.dtype,
        head_dim=int(query.shape[3]),
        head_dim_v=int(value.shape[3]),
        heads=int(query.shape[1]),
        heads_kv=int(key.shape[1]),
        causal=site.mask.causal,
        windowed=window[0] is not None or bool(window[1]),
        needs_backward=out.requires_grad,
        deterministic=deterministic,
        softcap=site.softcap,
    )


def _exchange(state: State) -> tuple[str | None, str]:
    asked = state.sharding.exchange
    if state.sharding.world_size == 1:
        return "local", "one rank"
    if asked == "auto":
        return "needed", "moves only the rows that some piece reads"
    return asked, "asked for"
