"""Decide for each site which exchange moves its keys and which kernel runs it. Pure: equal on all ranks."""

from __future__ import annotations

from dataclasses import replace

from cp_rewrite.refusal import Reason, Refusal

from .sites import Site
from .state import Decision, State


def plan_sites(state: State) -> State:
    """One Decision per site, or a Refusal that holds every reason."""
    decisions: list[Decision] = []
    refusals: list[Refusal] = []
    for site in state.sites:
        decision = _decide(site, state)
        (decisions if isinstance(decision, Decision) else refusals).append(decision)  # type: ignore[arg-type]
    return replace(state, decisions=tuple(decisions), refusals=state.refusals + tuple(refusals))


def _decide(site: Site, state: State) -> Decision | Refusal:
    exchange, why = _exchange(state)
    if exchange is None:
        return Refusal(Reason.EXCHANGE, why, site.node)
    return Decision(site, exchange, "reference", (why,))


def _exchange(state: State) -> tuple[str | None, str]:
    asked = state.sharding.exchange
    if state.sharding.world_size == 1:
        return "local", "one rank"
    if asked == "auto":
        return "needed", "moves only the rows that some piece reads"
    return asked, "asked for"
