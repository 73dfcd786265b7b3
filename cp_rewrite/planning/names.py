"""The names of layouts and exchanges, and what an exchange's name says."""

from __future__ import annotations

from typing import Literal, get_args

Layout = Literal["contiguous", "head_tail", "dual_chunk", "balanced"]
LAYOUTS: tuple[str, ...] = get_args(Layout)

ExchangeName = Literal["auto", "all_gather", "needed", "p2p", "a2a", "a2a+all_gather", "a2a+needed", "a2a+p2p"]
"""Exchanges that a user may ask for."""


def over_part(exchange: str, inner: int) -> str:
    """The name of `a2a+…` where heads are scattered over `inner` ranks, fewer than share a node: `a2a:2+needed`."""
    return exchange.replace("a2a+", f"a2a:{inner}+")


def part_of(exchange: str) -> int | None:
    """The ranks that `over_part` put into a name; None: all that share a node, or the mesh's last dim."""
    scattered = exchange.partition("+")[0]
    return int(scattered.removeprefix("a2a:")) if ":" in scattered else None


def split_exchange(exchange: str) -> tuple[bool, str]:
    """(whether heads are scattered, how keys travel then): `a2a+p2p` is (True, "p2p"), `a2a` (True, "local")."""
    scattered, _, outer = exchange.rpartition("+")
    return (True, "local") if exchange == "a2a" else (bool(scattered), outer)
