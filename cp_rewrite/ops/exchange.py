"""How key and value rows travel: from each rank's own rows to the expanded rows that its pieces read, and back.

Every exchange is a pair of plain functions over ops, found in one table. The rewrite calls `exchange_kv` on graph
proxies, the backward of attention calls both on tensors: one spelling. Rows of an exchange whose route is `in_steps`
(`p2p`) travel inside an attention op instead, and those of `push` do where the kernel runs in parts: see `attend`.

Shapes: R local rows, E expanded rows, Hkv key heads, D and V head dims of k and v, C = Hkv * (D + V).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from cp_rewrite.planning.routes.by_exchange import Exchange

from . import all_gather, all_to_all, local_rows, one_sided

Take = Callable[[Any, Any, Sequence[Any], Exchange, Tensor | None], Any]
Return = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor], Exchange], tuple[Tensor, Tensor]]

WAYS: dict[str, tuple[Take, Return]] = {
    "local": (local_rows.expand_kv, local_rows.sum_kv),
    "all_gather": (all_gather.gather_kv, all_gather.scatter_kv),
    "needed": (all_to_all.exchange_needed, all_to_all.return_needed),
    "push": (one_sided.push_kv, one_sided.return_kv),
}
"""Kind of exchange -> what carries out `exchange_kv` and `return_kv`."""


def exchange_kv(k: Any, v: Any, route: Sequence[Any], exchange: Exchange, after: Tensor | None = None) -> Any:
    """(E, C) expanded rows of this rank's pieces, from all ranks' k (R, Hkv, D) and v (R, Hkv, V).

    Not differentiable: attention's backward calls `return_kv`. Works on tensors and on graph proxies.

    Args:
        route: the tensors of `exchange.route`, in order.
        after: not read; rows travel after it is there. The backward names the gradient that it needs the rows for:
            without it a compiler may move the exchange up, hold the rows of all layers at once, and do so on some ranks
            only, or take it for the forward's (common subexpression) and keep the forward's rows.
    """
    take, _ = WAYS[exchange.kind]
    return take(k.detach(), v.detach(), route, exchange, after)


def return_kv(dkv: Tensor, k: Tensor, v: Tensor, route: Sequence[Tensor], exchange: Exchange) -> tuple[Tensor, Tensor]:
    """Gradients of k (R, Hkv, D) and v (R, Hkv, V), in fp32 or as wide as dkv, from those of the expanded rows (E, C)
    of all ranks."""
    _, give_back = WAYS[exchange.kind]
    return give_back(dkv, k, v, route, exchange)
