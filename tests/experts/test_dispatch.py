"""The op `experts` over ranks against one that owns all of them, in fp64: rows, gradients, and what mutants break."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_rewrite.experts import dispatch, gates
from cp_rewrite.experts.dispatch import Dispatch, join_group
from cp_rewrite.kernels import choices
from cp_rewrite.planning.cost.memory import ExpertLayer, Share
from tests.helpers.peak import peak_bytes
from tests.helpers.pool import Pool

E, C, F, K = 12, 5, 3, 3
Case = tuple[list[int], int, int]
"""Tokens of each rank, and the experts that are chosen: from, to."""
CASES: dict[str, Case] = {
    "uneven": ([7, 3, 6, 2], 0, E),
    "a rank without tokens": ([7, 0, 5, 2], 0, E),
    "all to the first rank": ([7, 3, 5, 2], 0, 3),
    "all to the last rank, from one": ([0, 0, 9, 0], 9, E),
    "none at all": ([0, 0, 0, 0], 0, E),
}
Operands = dict[str, Tensor]


def operands(case: Case, ranks: int, biased: bool) -> tuple[list[Operands], Operands]:
    """Each rank's tensors of tokens; the weights. Some choices are of no expert, some tokens choose one expert
    twice."""
    draw = torch.Generator().manual_seed(1)
    counts, low, high = case

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    of_ranks: list[Operands] = []
    for n in counts[:ranks]:
        chosen = torch.randint(low, high, (n, K), generator=draw)
        chosen[1:2, 0], chosen[2:3, 2], chosen[3:4] = -1, E, -1
        of_ranks.append({"x": made(n, C), "chosen": chosen, "weight": made(n, K), "grad": made(n, C)})
    weights = {"up": made(E, 2 * F, C), "down": made(E, C, F)}
    if biased:
        weights |= {"up_bias": made(E, 2 * F), "down_bias": made(E, C)}
    return of_ranks, weights


def by_hand(rows: Operands, weights: Operands, transposed: bool) -> Tensor:
    """Expert by expert, over masks."""
    out = torch.zeros_like(rows["x"])
    for e in range(E):
        up, down = (weights[name][e] if transposed else weights[name][e].T for name in ("up", "down"))
        first = rows["x"] @ up + (weights["up_bias"][e] if "up_bias" in weights else 0)
        y = gates.GATES["swiglu"](first) @ down + (weights["down_bias"][e] if "down_bias" in weights else 0)
        out = out + ((rows["chosen"] == e) * rows["weight"]).sum(1, keepdim=True) * y
    return out


def run(rows: Operands, weights: Operands, transposed: bool, group: str) -> Tensor:
    given = [weights.get(name) for name in ("up", "down", "up_bias", "down_bias")]
    return torch.ops.cp_rewrite.experts(rows["x"], rows["chosen"], rows["weight"], *given, "swiglu", transposed, group)[
        0
    ]


def leaves(values: Operands) -> Operands:
    return {k: v.detach().clone().requires_grad_(v.is_floating_point() and k != "grad") for k, v in values.items()}


def grads(*values: Operands) -> Operands:
    return {k: v.grad for each in values for k, v in each.items() if v.grad is not None}


def whole(case: Case, ranks: int, biased: bool, transposed: bool, how: Callable[..., Tensor]) -> list[Operands]:
    """Tensors that each rank must get: its rows and their gradients, and those of the experts that it owns."""
    of_ranks, weights = operands(case, ranks, biased)
    if transposed:
        weights |= {name: weights[name].transpose(1, 2).contiguous() for name in ("up", "down")}
    w, found = leaves(weights), list[Operands]()
    rows = [leaves(each) for each in of_ranks]
    outs = [how(each, w, transposed) for each in rows]
    torch.stack([(out * each["grad"]).sum() for out, each in zip(outs, rows, strict=True)]).sum().backward()
    of_weights = grads(w)
    for rank in range(ranks):
        own = {name: g.chunk(ranks)[rank] for name, g in of_weights.items()}
        found.append({"out": outs[rank].detach(), **grads(rows[rank]), **own})
    return found


def on_ranks(mesh: DeviceMesh, case: Case, biased: bool, transposed: bool, mutant: str) -> tuple[Operands, bool]:
    """The same of this rank; and whether a second run is equal bit for bit."""
    of_ranks, weights = operands(case, mesh.size(), biased)
    if transposed:
        weights |= {name: weights[name].transpose(1, 2).contiguous() for name in ("up", "down")}
    rank, group = mesh.get_local_rank(), join_group(mesh.mesh.tolist(), mesh.get_group(), mesh.size())
    runs: list[Operands] = []
    with pytest.MonkeyPatch.context() as patch:
        if mutant:
            MUTANTS[mutant](patch)
        for _ in range(2):
            rows, own = leaves(of_ranks[rank]), leaves({k: v.chunk(mesh.size())[rank] for k, v in weights.items()})
            out = run(rows, own, transposed, group)
            out.backward(rows["grad"])
            runs.append({"out": out.detach(), **grads(rows, own)})
    return runs[0], all(torch.equal(a, b) for a, b in zip(runs[0].values(), runs[1].values(), strict=True))


def same(found: Operands, expected: Operands) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.allclose(found[name], expected[name], rtol=1e-10, atol=1e-12) for name in expected)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_one_rank_is_right(biased: bool, transposed: bool) -> None:
    case = CASES["uneven"]
    expected = whole(case, 2, biased, transposed, by_hand)
    found = whole(case, 2, biased, transposed, lambda *given: run(*given, group=""))
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_ranks_are_right(pool: Pool, ranks: int, name: str) -> None:
    biased, transposed = ranks != 2, ranks == 3
    expected = whole(CASES[name], ranks, biased, transposed, by_hand)
    results = pool.run(ranks, on_ranks, CASES[name], biased, transposed, "")
    for (found, again), one in zip(results, expected, strict=True):
        assert same(found, one)
        assert again


def test_gradients_are_those_of_finite_differences() -> None:
    (rows, _), weights = operands(CASES["uneven"], 2, True)
    names, given = ("x", "weight", *weights), {**rows, **weights}

    def call(*values: Tensor) -> Tensor:
        each = {**given, **dict(zip(names, values, strict=True))}
        return run(each, each, False, "")

    assert torch.autograd.gradcheck(call, [given[name].clone().requires_grad_() for name in names])


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["swiglu", "relu2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_gates_are_right(gate: str, dtype: torch.dtype) -> None:
    """For any number of rows, by one compile of each of the two."""
    torch._dynamo.reset()
    columns = 16 if gate == "relu2" else 32
    for rows in (7, 1, 40, 2):
        draw = torch.Generator().manual_seed(rows)
        first, weight, grad = (torch.randn(rows, n, generator=draw) for n in (columns, 1, 16))
        given = first.to(dtype), weight, grad.to(dtype)
        for function, count in ((gates._weighed, 2), (gates._gradients, 3)):
            found = gates.run_compiled(function, gate, *given[:count])
            wanted = function(gates.GATES[gate], *given[:count])
            for a, b in zip(found, wanted, strict=True):
                assert a.dtype == b.dtype
                torch.testing.assert_close(a, b, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-2)


def test_a_copy_of_what_was_kept_is_an_error() -> None:
    kept = dispatch.hidden(torch.arange(6.0).view(2, 3))
    assert torch.equal(dispatch.shown(kept, 2, 3), torch.arange(6.0).view(2, 3))
    with pytest.raises(RuntimeError, match="save_on_cpu"):
        dispatch.shown(kept.clone(), 2, 3)


def test_a_copy_is_an_error_on_a_rank_without_tokens_too() -> None:
    """Others would wait for it in the exchange of gradients."""
    nothing, weights = torch.zeros(0, K), {"up": torch.ones(1, 2 * F, C), "down": torch.ones(1, C, F)}
    rows = {"x": torch.zeros(0, C, requires_grad=True), "chosen": nothing.long(), "weight": nothing}
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        out = run(rows, weights, False, "")
    with pytest.raises(RuntimeError, match="save_on_cpu"):
        out.sum().backward()


# -- mutants: each is one change of the dispatch that must show ----------------------------------------------


def _skip_a_sum(patch: pytest.MonkeyPatch) -> None:
    """A token takes the row of its first rank alone."""

    def home(self: Any, rows: Tensor) -> Tensor:
        first = torch.where((self.at >= 0).cumsum(1) == 1, self.at, -1)
        return choices.add_listed(self.exchange(rows, back=True), first)

    patch.setattr(Dispatch, "home", home)


def _skip_pairs(patch: pytest.MonkeyPatch) -> None:
    """An owner adds up none but a row's last choice."""

    def added(self: Any, pairs: Tensor) -> Tensor:
        last = torch.where((self.at >= 0).flip(1).cumsum(1).flip(1) == 1, self.at, -1)
        return choices.add_listed(pairs, last)

    patch.setattr(dispatch._Products, "_added", added)


def _swap_owners(patch: pytest.MonkeyPatch) -> None:
    """Ranks are taken in the other order."""
    route, pick = choices.route, choices.pick

    def swapped(chosen: Tensor, own: int, ranks: int) -> Tensor:
        there = (chosen >= 0) & (chosen < own * ranks)
        return torch.where(there, chosen % own + (ranks - 1 - chosen // own) * own, chosen)

    patch.setattr(choices, "route", lambda c, weight, own, ranks: route(swapped(c, own, ranks), weight, own, ranks))
    patch.setattr(choices, "pick", lambda x, at, c, own: pick(x, at, swapped(c, own, at.shape[1]), own))


def _weights_of_others(patch: pytest.MonkeyPatch) -> None:
    """Choices of other ranks are sent as this one's last, with their weights."""
    plain = choices.route

    def route(chosen: Tensor, weight: Tensor, own: int, ranks: int) -> choices.Routed:
        routed = plain(chosen, weight, own, ranks)
        ids, bits = routed.packed.chunk(2, 1)
        one = torch.ones_like(weight[:1, :1]).view(bits.dtype)
        packed = torch.cat([torch.where(ids == own, own - 1, ids), torch.where(bits == 0, one, bits)], 1)
        return routed._replace(packed=packed)

    patch.setattr(choices, "route", route)


def _weights_not_masked_home(patch: pytest.MonkeyPatch) -> None:
    """Gradients of a token's weights are those of its first rank, whoever owns the choice."""

    def home(self: Any, rows: Tensor) -> Tensor:
        found = torch.cat([self.exchange(rows, back=True), rows.new_zeros(1, K)])
        at = self.at.max(1, keepdim=True).values.expand(-1, K)
        return found.gather(0, torch.where(at < 0, found.shape[0] - 1, at))

    patch.setattr(Dispatch, "home_by_choice", home)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a sum over ranks skipped": _skip_a_sum,
    "a sum over choices skipped": _skip_pairs,
    "owners swapped": _swap_owners,
    "weights' mask dropped": _weights_of_others,
    "weights' gradients not masked": _weights_not_masked_home,
}


@pytest.mark.parametrize("mutant", [*MUTANTS])
def test_mutants_die(pool: Pool, mutant: str) -> None:
    expected = whole(CASES["uneven"], 2, False, False, by_hand)
    results = pool.run(2, on_ranks, CASES["uneven"], False, False, mutant)
    assert not all(same(found, one) for (found, _), one in zip(results, expected, strict=True))


LARGE = ExpertLayer(experts=8, chosen=2, columns=96, first=128, inner=64, parameters=8 * 96 * 192, trained=0)
"""Sizes next to which what is not counted, numbers of rows and of pairs, is next to nothing."""


def large(dtype: torch.dtype, tokens: int = 1024) -> tuple[Operands, Operands]:
    """Tokens, weights."""
    x, scores = torch.randn(tokens, LARGE.columns, dtype=dtype), torch.rand(tokens, LARGE.experts)
    weight, chosen = scores.topk(LARGE.chosen)
    up = torch.randn(LARGE.experts, LARGE.first, LARGE.columns, dtype=dtype)
    down = torch.randn(LARGE.experts, LARGE.columns, LARGE.inner, dtype=dtype)
    return {"x": x, "chosen": chosen, "weight": weight}, {"up": up, "down": down}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_forecast_of_what_is_kept_is_what_is_kept(dtype: torch.dtype) -> None:
    rows, weights = leaves(large(dtype)[0]), leaves(large(dtype)[1])
    out = run(rows, weights, False, "")
    saved = {*out.grad_fn.saved_tensors} - {*weights.values()}  # type: ignore[union-attr]
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    foretold = LARGE.kept(1, dtype.itemsize) * rows["x"].shape[0]
    assert sum(held.values()) == pytest.approx(foretold, rel=2e-3)


@pytest.mark.parametrize(("tokens", "dtype"), [(64, torch.float32), (2048, torch.float32), (2048, torch.bfloat16)])
def test_the_forecast_of_the_backward_is_what_it_takes(tokens: int, dtype: torch.dtype) -> None:
    """Where gradients of weights are most of it, and where pairs are."""
    foretold = LARGE.in_backward(Share(tokens, tokens, 1, item_bytes=dtype.itemsize))
    assert backward_bytes(*map(leaves, large(dtype, tokens))) == pytest.approx(foretold, rel=0.05)


def test_the_forecast_knows_weights_that_the_op_casts() -> None:
    """Those that FSDP leaves alone, of the half of the experts that is here."""
    rows, weights = leaves(large(torch.bfloat16, 64)[0]), leaves(large(torch.float32)[1])
    both = replace(LARGE, experts=2 * LARGE.experts, parameters=2 * LARGE.parameters)
    assert backward_bytes(rows, weights) == pytest.approx(both.in_backward(Share(64, 64, 2, experts=2)), rel=0.1)


def backward_bytes(rows: Operands, weights: Operands) -> int:
    out = run(rows, weights, False, "")
    grad = torch.compile(torch.rand_like, backend="eager")(out)  # from then on callers hold what they give
    return peak_bytes(lambda: out.backward(grad))


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_the_forecast_of_rows_is_their_mean(n: int) -> None:
    """Over all choices that a token may have: it goes to each rank that has some of them."""
    for k in (1, 2, 3, 8):
        chosen = list(itertools.combinations(range(8), k))
        goes = sum(len({e // (8 // n) for e in each}) for each in chosen)
        assert replace(LARGE, chosen=k).received(n) == pytest.approx(goes / len(chosen))
