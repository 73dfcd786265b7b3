"""How key and value rows travel: from each rank's own rows to the expanded rows that its pieces read, and back.

Every exchange is a pair of plain functions over ops, in the file of `exchanges/` that has its name. The rewrite calls
`exchange_kv` on graph proxies, the backward of attention calls both on tensors: one spelling. Rows of an exchange whose
route is `in_steps` (`p2p`) travel inside an attention op instead, and those of `push` do where the kernel runs in
parts: see `attend`.

Shapes: R local rows, E expanded rows, Hkv key heads, D and V head dims of k and v, C = Hkv * (D + V).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from torch import Tensor

from cp_rewrite.planning.routes.by_exchange import ROUTES, Exchange


class Carrier(Protocol):
    """A file of `exchanges/`."""

    def take(self, k: Any, v: Any, route: Sequence[Any], exchange: Exchange, after: Tensor | None, /) -> Any:
        """`exchange_kv`, of k and v cut off from gradients."""
        ...

    def give_back(
        self, dkv: Tensor, k: Tensor, v: Tensor, route: Sequence[Tensor], exchange: Exchange, /
    ) -> tuple[Tensor, Tensor]:
        """`return_kv`."""
        ...


CARRIERS: dict[str, Carrier] = {
    kind: cast("Carrier", import_module(f"cp_rewrite.ops.exchanges.{kind}"))
    for kind, route in ROUTES.items()
    if not route.in_steps
}
"""Kind of exchange -> the file of its name."""


def exchange_kv(k: Any, v: Any, route: Sequence[Any], exchange: Exchange, after: Tensor | None = None) -> Any:
    """(E, C) expanded rows of this rank's pieces, from all ranks' k (R, Hkv, D) and v (R, Hkv, V).

    Not differentiable: attention's backward calls `return_kv`. Works on tensors and on graph proxies.

    Args:
        route: the tensors of `exchange.route`, in order.
        after: not read; rows travel after it is there. The backward names the gradient that it needs the rows for:
            without it a compiler may move the exchange up, hold the rows of all layers at once, and do so on some ranks
            only, or take it for the forward's (common subexpression) and keep the forward's rows.
    """
    return CARRIERS[exchange.kind].take(k.detach(), v.detach(), route, exchange, after)


def return_kv(dkv: Tensor, k: Tensor, v: Tensor, route: Sequence[Tensor], exchange: Exchange) -> tuple[Tensor, Tensor]:
    """Gradients of k (R, Hkv, D) and v (R, Hkv, V), in fp32 or as wide as dkv, from those of the expanded rows (E, C)
    of all ranks."""
    return CARRIERS[exchange.kind].give_back(dkv, k, v, route, exchange)
