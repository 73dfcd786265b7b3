"""Experts that ranks share: a token goes once to each rank that owns one of its choices, and one row comes back.

    rank 0 owns experts 0 1, rank 1 owns 2 3       tokens a b c of rank 0, two choices each

    token   chosen    to rank 0          to rank 1                comes back, and is added up in the order of ranks
    a       0 3       a: 0 -             a: - 1                   w0 f0(a)   +   w3 f3(a)
    b       2 3                          b: 0 1                   w2 f2(b) + w3 f3(b), one row
    c       1 -1      c: 1 -                                      w1 f1(c)

    counts ─ rows to each rank, and what its experts get of them, so that the host knows all sizes at once
    rows ─── to the owners, with their choices there and the weights of these
    owner ── sorts (row, choice) pairs by expert, runs grouped products, and adds up each row's pairs in order
    back ─── one row for each that came; a token adds up what its ranks gave

Nothing is dropped. All sums are over lists in a fixed order: two runs are bitwise equal. Rows that fill a rank up have
the choice -1, and go nowhere.

The backward sends gradients of rows to their owners, and back. For it the forward gives, beside the rows that came, the
places of rows and pairs, the weights of pairs, and the results of the first product. How long these are hangs on what
tokens choose, which no compiler can know: to compilers each has one entry, and holds the memory of all (`hidden`). In a
checkpoint they are dropped, and made once more.

Shapes: N tokens with k choices, C columns, F columns between the products; P ranks of e experts, E = P e. S rows are
sent, R received; M (row, choice) pairs are of experts here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op, register_autograd

from cp_rewrite.kernels import choices
from cp_rewrite.kernels import rows as row_kernels
from cp_rewrite.kernels.cuda import nvtx
from cp_rewrite.ops.exchanges.needed import all_to_all_rows
from cp_rewrite.ops.schemas import bind, call, gradients, keep, kept

from . import gates

GROUPS: dict[str, tuple[str, int]] = {"": ("", 1)}
"""Names that all ranks know, as graphs are compared -> (the name of this rank's process group, its size)."""
LOADS: deque[list[int]] = deque(maxlen=4096)
"""Rows that each rank of the group got, for each call of a layer in the newest batch. `cp.trace` tells of them."""
_ops: Any = torch.ops.cp_rewrite


@custom_op("cp_rewrite::experts", mutates_args=())
def experts(
    x: Tensor, chosen: Tensor, weight: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None, gate: str, transposed: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(N, C): for each token the sum over its choices of weight · down(gate(up(x))), in x's dtype; and what the
    backward reads, each `hidden`.

    Args:
        x: (N, C). chosen: (N, k) integers, of all E experts; others than 0 … E - 1 count for nothing. weight: (N, k).
        up: (e, G, C), G the columns that the gate takes. down: (e, C, F). Both are used in x's dtype. `transposed`:
            their last two dims are swapped.
        up_bias, down_bias: (e, G) and (e, C).
        gate: of `GATES`. group: of `GROUPS`, whose ranks share experts; "": this rank owns all.
    """
    way, packed = Dispatch.of(chosen, weight, up.shape[0], group)
    rows = way.go(x)
    pairs = Pairs.of(packed, way)
    products = _Products(pairs, transposed, up, down, up_bias, down_bias, x.dtype)
    first = products.first(rows)
    out = way.home(products.second(first, gate))
    known, places = torch.tensor(way.known, device="cpu"), torch.cat([*way.places, *pairs.places])
    return out, *map(hidden, (known, places, pairs.weight, rows, first))


@experts.register_fake
def _(x: Tensor, chosen: Tensor, weight: Tensor, *_: Any) -> Any:
    known, places = torch.empty(1, dtype=torch.int64, device="cpu"), chosen.new_empty(1, dtype=torch.int32)
    return x.new_empty(x.shape), known, places, weight.new_empty(1, dtype=_wide(weight)), x.new_empty(1), x.new_empty(1)


@custom_op("cp_rewrite::experts_backward", mutates_args=())
def experts_backward(
    grad: Tensor, chosen: Tensor, weight: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None, gate: str, transposed: bool, group: str, known: Tensor, places: Tensor, weights: Tensor,
    rows: Tensor, first: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, weight, up, down and the biases that there are. Those of experts are sums over the tokens of all
    ranks of the group. known, places, weights, rows, first: as `experts` gave them."""
    way, pairs = _kept(chosen, up.shape[0], group, known, places, weights)
    products = _Products(pairs, transposed, up, down, up_bias, down_bias, grad.dtype)
    rows, first = shown(rows, sum(way.recv), grad.shape[1]), shown(first, products.size, products.up.shape[2])
    dx, dweight, *others = products.backward(rows, first, lambda: way.go(grad), gate)
    return [way.home(dx), way.home_by_choice(dweight).to(weight.dtype), *others]


@experts_backward.register_fake
def _(
    grad: Tensor, chosen: Tensor, weight: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
    down_bias: Tensor | None, *_: Any,
) -> list[Tensor]:  # fmt: skip
    given = (grad, weight, up, down, up_bias, down_bias)
    return [t.new_empty(t.shape) for t in given if t is not None]


def hidden(x: Tensor) -> Tensor:
    """(1,): the first entry of a contiguous tensor, with the memory of all of it."""
    x = x.contiguous() if x.numel() else x.new_zeros(1)
    assert not x.storage_offset(), "the backward reads the memory from its beginning"
    return x.new_empty(0).set_(x.untyped_storage(), 0, (1,), (1,))


def shown(x: Tensor, *shape: int) -> Tensor:
    """The tensor of this shape that `hidden` was given.

    Raises:
        RuntimeError: a copy of the entry came back.
    """
    entries = x.untyped_storage().nbytes() // x.element_size()
    needed = math.prod(shape)
    if needed > entries or x.storage_offset():
        raise RuntimeError(
            f"cp_rewrite: experts kept {needed} entries for the backward, and {entries} came back: what autograd saves "
            "was copied (torch.autograd.graph.saved_tensors_hooks, save_on_cpu). Checkpoint the layer instead"
        )
    return x.new_empty(0).set_(x.untyped_storage(), 0, shape) if needed else x.new_empty(shape)


class Dispatch:
    """Destinations of a rank's tokens.

    known: send, recv and sizes, on the host: rows to and from each rank, and pairs of each expert of this rank.
    at: (N, P) the row sent for a token to a rank, -1 for none. token: (S,) of each row sent. ends: (e,) of the pairs of
        each expert. All int32.
    """

    def __init__(
        self, chosen: Tensor, own: int, group: str, known: list[int], at: Tensor, token: Tensor, ends: Tensor
    ) -> None:
        self.chosen, self.own, (self.group, self.ranks) = chosen, own, GROUPS[group]
        self.known, self.at, self.ends = known, at, ends
        self.send, self.recv, self.sizes = (known[i:j] for i, j in _spans(self.ranks, self.ranks, own))
        self.token = token[: sum(self.send)]

    @classmethod
    def of(cls, chosen: Tensor, weight: Tensor, own: int, group: str) -> tuple[Dispatch, Tensor]:
        """The way of tokens; and of the rows that came, (R, 2 k), their choices and weights as `choices.route` packs
        them. All that needs no sizes is enqueued before the host waits for them, once."""
        name, ranks = GROUPS[group]
        chosen = chosen.long()
        counts, at, token, packed = choices.route(chosen, weight.to(_wide(weight)), own, ranks)
        got = _all_to_all(counts, [1] * ranks, [1] * ranks, name) if name else counts
        sums = got[:, 1:].sum(0)  # pairs of experts here, and rows that each rank gets
        ends = sums[:own].cumsum(0, dtype=torch.int32)
        told: list[int] = torch.cat([counts[:, 0], got[:, 0], sums]).tolist()  # the one wait for the device
        LOADS.append(told[-ranks:])
        way = cls(chosen, own, group, told[:-ranks], at, token, ends)
        return way, way.exchange(packed[: sum(way.send)])

    @property
    def places(self) -> list[Tensor]:
        """All that the device knows of it."""
        return [self.at.flatten(), self.token, self.ends]

    def go(self, x: Tensor) -> Tensor:
        """(R, …) what ranks sent, by rank, of rows (N, …)."""
        return self.exchange(row_kernels.gather_rows(x.contiguous(), self.token))

    def home(self, rows: Tensor) -> Tensor:
        """(N, C): of each token the sum of what comes back, rank after rank, in the dtype of `rows` (R, C)."""
        return choices.add_listed(self.exchange(rows, back=True), self.at)

    def home_by_choice(self, rows: Tensor) -> Tensor:
        """(N, k): what comes back for each choice. rows: (R, k)."""
        return choices.pick(self.exchange(rows, back=True), self.at, self.chosen, self.own)

    def exchange(self, x: Tensor, back: bool = False) -> Tensor:
        if not self.group:
            return x
        recv, send = (self.send, self.recv) if back else (self.recv, self.send)
        return _all_to_all(x, recv, send, self.group)


class Pairs(NamedTuple):
    """The pairs of received rows and experts here, sorted by expert.

    row: (M,) the received row of each pair. at: (R, k) the pair of a row's choice, -1 for none. weight: (M, 1).
    ends: (e,) of each expert's pairs. sizes: pairs of each expert, on the host.
    """

    row: Tensor
    at: Tensor
    weight: Tensor
    ends: Tensor
    sizes: list[int]

    @classmethod
    def of(cls, packed: Tensor, way: Dispatch) -> Pairs:
        """The pairs of the rows that came."""
        row, weight, at = choices.sort(packed, way.ends, sum(way.sizes))
        return cls(row, at, weight, way.ends, way.sizes)

    @property
    def places(self) -> list[Tensor]:
        return [self.row, self.at.flatten()]


def _kept(
    chosen: Tensor, own: int, group: str, given: Tensor, places: Tensor, weights: Tensor
) -> tuple[Dispatch, Pairs]:
    """Both, as the forward's were: of the numbers and places that it kept, and the weights of pairs."""
    (N, k), ranks = chosen.shape, GROUPS[group][1]
    known: list[int] = shown(given, 2 * ranks + own).tolist()
    S, R, M = (sum(known[i:j]) for i, j in _spans(ranks, ranks, own))
    sizes = [N * ranks, S, own, M, R * k]
    at, token, ends, row, at_pairs = shown(places, sum(sizes)).split(sizes)
    way = Dispatch(chosen.long(), own, group, known, at.view(N, ranks), token, ends)
    return way, Pairs(row, at_pairs.view(R, k), shown(weights, M, 1), ends, way.sizes)


class _Products:
    """The products over pairs, expert by expert."""

    def __init__(
        self, pairs: Pairs, transposed: bool, up: Tensor, down: Tensor, up_bias: Tensor | None,
        down_bias: Tensor | None, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.given = [up, down, *(bias for bias in (up_bias, down_bias) if bias is not None)]
        # (e, C, G) and (e, F, C)
        self.up, self.down = (w.to(dtype) if transposed else w.to(dtype).transpose(1, 2) for w in (up, down))
        self.up_bias, self.down_bias, self.transposed = up_bias, down_bias, transposed
        self.row, self.at, self.weight, self.ends, self.sizes = pairs
        self.size = sum(self.sizes)

    @cached_property
    def expert(self) -> Tensor:
        """(M,) of each pair."""
        return torch.searchsorted(self.ends, torch.arange(self.size, device=self.ends.device), right=True)

    def first(self, rows: Tensor) -> Tensor:
        """(M, G): what the first product gives of received rows (R, C)."""
        first = self._grouped(self._picked(rows), self.up)
        return first if self.up_bias is None else first + self.up_bias[self.expert].to(first.dtype)

    def second(self, first: Tensor, gate: str) -> Tensor:
        """(R, C) of that: what the experts here give, weighed and added up, in its dtype."""
        y = self._grouped(gates.weighed(gate, first, self.weight), self.down)
        if self.down_bias is not None:
            y = y + (self.down_bias[self.expert] * self.weight).to(y.dtype)
        return self._added(y)

    def backward(self, rows: Tensor, first: Tensor, receive: Callable[[], Tensor], gate: str) -> list[Tensor]:
        """Gradients of received rows, of the weights of their choices, and of what is `given`. receive: brings those of
        what the rows gave, (R, C).

        Tensors go as soon as they are read: in a checkpointed layer this is where memory peaks. What a function is
        given its caller holds, too, once Dynamo runs Python's frames.
        """
        dy = self._picked(receive())
        dweighed = self._grouped(dy, self.down.transpose(1, 2))
        weighed, dfirst, dweight = gates.gradients(gate, first, self.weight, dweighed)
        del dweighed
        ddown = self._outer(weighed, dy) if self.transposed else self._outer(dy, weighed)
        biases: list[Tensor] = []
        if self.up_bias is not None:
            biases.append(self._by_expert(dfirst))
        if self.down_bias is not None:
            dweight = dweight + (dy * self.down_bias[self.expert]).to(dweight.dtype).sum(1, keepdim=True)
            biases.append(self._by_expert(dy * self.weight))
        del dy, weighed
        x = self._picked(rows)
        dup = self._outer(x, dfirst) if self.transposed else self._outer(dfirst, x)
        del x
        dx = self._grouped(dfirst, self.up.transpose(1, 2))
        del dfirst
        dweight = choices.add_listed(dweight, self.at.view(-1, 1)).view(self.at.shape)
        found = [g.to(p.dtype).contiguous() for g, p in zip([dup, ddown, *biases], self.given, strict=True)]
        return [self._added(dx), dweight, *found]

    def _picked(self, rows: Tensor) -> Tensor:
        return row_kernels.gather_rows(rows, self.row)

    def _added(self, pairs: Tensor) -> Tensor:
        """(R, C): of each row the sum of its pairs, choice after choice, in their dtype."""
        return choices.add_listed(pairs, self.at)

    def _grouped(self, x: Tensor, weight: Tensor) -> Tensor:
        """(M, B): each pair's row (M, A) times the matrix of its expert, of (e, A, B)."""
        if not self.size:
            return x.new_zeros(0, weight.shape[2])
        if _has_grouped(x, weight):
            return F.grouped_mm(x, weight, offs=self.ends)
        out = x.new_empty(self.size, weight.shape[2])
        for i, (part, into) in enumerate(zip(x.split(self.sizes), out.split(self.sizes), strict=True)):
            torch.mm(part, weight[i], out=into)
        return out

    def _outer(self, a: Tensor, b: Tensor) -> Tensor:
        """(e, A, B): of each expert the sum over its pairs of a (M, A) times b (M, B)."""
        if not self.size:
            return a.new_zeros(len(self.sizes), a.shape[1], b.shape[1])
        if _has_grouped(a, b):
            out = F.grouped_mm(a.t(), b, offs=self.ends)
            for i, size in enumerate(self.sizes):
                if not size:  # a sum of nothing, which a kernel may leave unwritten
                    out[i].zero_()
            return out
        out = a.new_empty(len(self.sizes), a.shape[1], b.shape[1])
        for x, y, into in zip(a.split(self.sizes), b.split(self.sizes), out, strict=True):
            torch.mm(x.t(), y, out=into)
        return out

    def _by_expert(self, rows: Tensor) -> Tensor:
        """(e, A): of each expert the sum over its pairs of rows (M, A)."""
        return torch.stack([part.sum(0) for part in rows.split(self.sizes)])


def _has_grouped(a: Tensor, b: Tensor) -> bool:
    aligned = all(size % 8 == 0 for t in (a, b) for size in t.shape[1:])
    return a.is_cuda and a.dtype is torch.bfloat16 and aligned and hasattr(F, "grouped_mm")


def _wide(weight: Tensor) -> torch.dtype:
    """The dtype in which weights travel, and the numbers of experts beside them."""
    return torch.promote_types(weight.dtype, torch.float32)


def _spans(*sizes: int) -> list[tuple[int, int]]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return list(zip([0, *ends], ends, strict=False))


def _all_to_all(x: Tensor, recv: Sequence[int], send: Sequence[int], group: str) -> Tensor:
    with nvtx("experts"):
        return all_to_all_rows(x, [*recv], [*send], group)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x = bind(_ops.experts.default, inputs)
    x.known, x.places, x.weights, x.rows, x.first = output[1:]
    ctx.mark_non_differentiable(*output[1:])
    del x.x
    keep(ctx, **vars(x))


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    x = kept(ctx)
    x.x = None
    names = [n for n in ("x", "weight", "up", "down", "up_bias", "down_bias") if n == "x" or getattr(x, n) is not None]
    found = call(_ops.experts_backward.default, x, grad=grad.contiguous())
    return gradients(_ops.experts.default, x, **dict(zip(names, found, strict=True)))


register_autograd("cp_rewrite::experts", _backward, setup_context=_setup)


def join_group(ranks: Sequence[int], group: dist.ProcessGroup, size: int) -> str:
    """The name by which graphs know one of the groups that a mesh of these ranks is made of, `size` of them each: equal
    on all ranks of the mesh."""
    name = f"experts_{size}_of_{'_'.join(map(str, ranks))}"
    GROUPS[name] = (group.group_name, size)
    return name
