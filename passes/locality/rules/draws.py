"""Random numbers that each rank may draw for its own tokens (`Sharding.random`).

A draw for every token, as dropout makes it, is as good from any generator. One that all tokens share (dropout on a
weight, noise per expert) must be the same on all ranks, and is refused.
"""

from __future__ import annotations

from cp_rewrite.passes.locality.claims.dims import Mixes
from cp_rewrite.passes.locality.claims.tensor_state import REPLICATED, Rows
from cp_rewrite.passes.locality.node.call import Call
from cp_rewrite.refusal import Reason

from .rule import States

_OF_SIZES = frozenset({"rand", "randn", "randint"})
_PER_ENTRY = frozenset(
    {"native_dropout", "bernoulli", "rand_like", "randn_like", "randint_like", "uniform", "normal", "exponential"}
    | {"random", "geometric", "cauchy", "log_normal", "poisson", "normal_functional", "rrelu_with_noise"}
)


def drawn(call: Call) -> States:
    """Of sizes that count tokens, or of rows, entry by entry: rows. multinomial: of ordinary dims."""
    if call.name in _OF_SIZES:
        dims = call.extents.label(call.sizes(call.outs[0]))
        if dims is not None:
            return Rows(dims)
    tensors = [x for x in call.tensors if call.rows(x)]
    shared = [x for x in call.tensors if call.state(x) is not REPLICATED and not call.rows(x)]
    if tensors and not shared and (call.name in _PER_ENTRY or call.name == "multinomial"):
        call.use_positions(*tensors)
        rows = call.rows(tensors[0])
        assert rows is not None
        if call.name == "multinomial":
            call.refuse_axis(rows, call.first.ndim - 1, "draws from")
        if any(call.rows(x) is None or call.entries(x) != call.entries(tensors[0]) for x in call.tensors):
            raise Mixes(f"{call.name} draws for token rows by something that is not cut like them", Reason.DROPOUT)
        return Rows(rows.dims, attended=any(r.attended for x in tensors if (r := call.rows(x))))
    raise Mixes(
        f"{call.name} draws random numbers that all ranks share, which differ between them: draw them outside of the "
        "model, and pass them in",
        Reason.DROPOUT,
    )
