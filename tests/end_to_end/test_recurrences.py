"""Models that pass a state through tokens: one process's loss and gradients, on any rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from tests.border import model as border_model
from tests.border import scans
from tests.helpers.pages import run_line
from tests.helpers.pool import Pool
from tests.helpers.recurrent_model import DIM, HEADS, KINDS, TOKENS, WIDTH, RecurrentModel, packed

PACKING = cp.CuSeqlens("cu_seqlens")
Lengths = Sequence[int]


def grads_of(model: RecurrentModel) -> dict[str, Tensor]:
    return {key: p.grad.double() for key, p in model.named_parameters() if p.grad is not None}


def sharded_step(
    mesh: DeviceMesh, kinds: Sequence[str], resets: bool, batches: Sequence[Any], layout: Any, dtype: torch.dtype,
    states: cp.StateLayers | None,
) -> list[tuple[float, dict[str, Any]]]:  # fmt: skip
    sharding = cp.Sharding(mesh, TOKENS, PACKING, layout, "all_gather", inner="aot_eager", states=states)
    torch._dynamo.reset()
    model = RecurrentModel(kinds, resets).to(dtype)
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    found: list[tuple[float, dict[str, Any]]] = []
    for batch in batches:
        model.zero_grad()
        with sharding.shard(batch) as local:
            loss = compiled(**local)
            loss.backward()
        cp.sum_gradients(model.parameters(), sharding)
        found.append((loss.item(), {key: grad.numpy() for key, grad in grads_of(model).items()}))
    return found


def compare(
    pool: Pool,
    ranks: int,
    layout: str,
    sizes: Sequence[Lengths],
    *,
    kinds: Sequence[str] = KINDS,
    resets: bool = False,
    dtype: torch.dtype = torch.float64,
    states: cp.StateLayers | None = None,
) -> None:
    """`sizes`: lengths of documents, of batches that follow each other."""
    batches = [packed(lengths) for lengths in sizes]
    results = pool.run(ranks, sharded_step, kinds, resets, batches, layout, dtype, states)
    limit = 1e-7 if dtype is torch.float64 else 1e-5
    for i, batch in enumerate(batches):
        model = RecurrentModel(kinds, resets).to(dtype)
        loss = model(**batch)
        loss.backward()
        assert sum(rank[i][0] for rank in results) == pytest.approx(loss.item(), rel=limit)
        for key, grad in grads_of(model).items():
            error = (torch.from_numpy(results[0][i][1][key]) - grad).norm()
            assert error <= limit * grad.norm(), f"{key}: {error}, of batch {i}"


@pytest.mark.parametrize("resets", [False, True])
def test_states_are_those_of_one_process(pool: Pool, resets: bool) -> None:
    compare(pool, 2, "balanced", [(5, 1, 70, 9)], resets=resets)


def test_plans_that_weigh_states_give_the_same(pool: Pool) -> None:
    layers = cp.StateLayers("gated_delta_rule", heads=64, keys=128, values=128, resets=False)
    assert not (cp.plan([300], 2).rank_of == cp.plan([300], 2, states=layers).rank_of).all()
    compare(pool, 2, "balanced", [(300,), (5, 1, 170, 90)], kinds=KINDS[:1], states=layers)


@pytest.mark.slow
@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize(
    ("ranks", "layout", "sizes", "dtype"),
    [
        (2, "head_tail", [(131,), (1, 1, 1)], torch.float64),
        (3, "contiguous", [(64, 1, 130), (7, 200)], torch.float64),
        (3, "balanced", [(1, 1, 1, 1, 1), (65, 64, 63)], torch.float32),
        (4, "dual_chunk", [(300, 5, 1, 12), (9,)], torch.float64),
        (4, "balanced", [(190, 3, 40, 1)], torch.float32),
    ],
)
def test_states_on_more_ranks(
    pool: Pool, ranks: int, layout: str, sizes: Sequence[Lengths], dtype: torch.dtype, resets: bool
) -> None:
    compare(pool, ranks, layout, sizes, resets=resets, dtype=dtype)


class Convolved(RecurrentModel):
    """Each layer begins with a convolution over four tokens, the last of them its own; some pad by another number."""

    def __init__(self, kinds: Sequence[str] = KINDS) -> None:
        super().__init__(kinds)
        self.convolutions = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3) for _ in kinds)

    def layer(self, kind: str, number: int, h: Tensor, offsets: Tensor | None) -> Tensor:
        conv, x = self.convolutions[number], h.mT
        if number % 2:
            padded = F.pad(x, (3, 0), value=0.5)
            convolved = F.conv1d(padded, conv.weight, conv.bias, groups=WIDTH)  # type: ignore[arg-type]
        else:
            convolved = conv(x)[..., : h.shape[1]]
        return super().layer(kind, number, convolved.mT, offsets)


def reset_steps(mesh: DeviceMesh, layouts: Sequence[Any], sizes: Sequence[Lengths]) -> list[Any]:
    """Loss and gradients of each layout and batch, by one graph, of a model that passes no offsets."""
    torch._dynamo.reset()
    model, found = Convolved().double(), list[Any]()
    for layout in layouts:
        sharding = cp.Sharding(mesh, TOKENS, PACKING, layout, "all_gather", inner="eager", reset_states=True)
        compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
        for lengths in sizes:
            model.zero_grad()
            with sharding.shard(packed(lengths)) as local:
                loss = compiled(**local)
                loss.backward()
            cp.sum_gradients(model.parameters(), sharding)
            found.append((loss.item(), {key: grad.numpy() for key, grad in grads_of(model).items()}))
    return found


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (1, ["balanced"]),
        (2, ["balanced"]),
        pytest.param(2, ["dual_chunk", "head_tail"], marks=pytest.mark.slow),
        pytest.param(3, ["balanced", "contiguous", "head_tail"], marks=pytest.mark.slow),
    ],
)
def test_with_resets_each_document_is_as_alone(pool: Pool, ranks: int, layouts: Sequence[str]) -> None:
    sizes = [(5, 1, 70, 9), (1, 1, 131), (1, 1, 1, 1)]
    results = pool.run(ranks, reset_steps, layouts, sizes)
    for i, lengths in enumerate(sizes * len(layouts)):
        model, batch, losses = Convolved().double(), packed(lengths), list[float]()
        cuts = [batch[key].split(list(lengths), 1) for key in TOKENS]
        for input_ids, labels in zip(*cuts, strict=True):
            loss = model(input_ids, labels, torch.tensor([0, input_ids.shape[1]], dtype=torch.int32))
            loss.backward()
            losses.append(loss.item())
        assert sum(rank[i][0] for rank in results) == pytest.approx(sum(losses), rel=1e-9)
        for key, grad in grads_of(model).items():
            error = (torch.from_numpy(results[0][i][1][key]) - grad).norm()
            assert error <= 1e-9 * grad.norm(), f"{key}: {error}, of {lengths}"


class Moving(RecurrentModel):
    """Two layers, of what `before` makes of their tokens, and what `after` makes of the last one's. On one process each
    document goes through the layers by itself."""

    def __init__(
        self, before: Callable[[Any, Tensor], Tensor], after: Callable[[Tensor], Tensor] = torch.clone
    ) -> None:
        super().__init__(KINDS[:2])
        self.before, self.after = before, after
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)
        self.own_offsets: Tensor | None = None

    def layers(self, h: Tensor) -> Tensor:
        for number, kind in enumerate(self.kinds):
            h = h + self.layer(kind, number, self.before(self, h), self.own_offsets)
        return h

    def forward(self, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Tensor:
        self.own_offsets, h = cu_seqlens if self.resets else None, self.embed(input_ids)
        whole = torch.compiler.is_compiling() or self.resets
        h = self.layers(h) if whole else torch.cat([self.layers(x) for x in h.split(cu_seqlens.diff().tolist(), 1)], 1)
        return F.cross_entropy(self.head(self.after(h)).flatten(0, 1), labels.flatten(), reduction="sum")


def convolved(m: Moving, h: Tensor) -> Tensor:
    return m.convolution(h.mT)[..., : h.shape[1]].mT


def of_pads(m: Moving, h: Tensor) -> Tensor:
    weight = m.convolution.weight
    return sum((weight[:, 0, 3 - i] * F.pad(h, (0, 0, i, -i)) for i in range(4)), torch.zeros(()))


def of_slices(m: Moving, h: Tensor) -> Tensor:
    return torch.cat([0 * h[:, :1], h[:, :-1]], 1) + h


def unfolded(m: Moving, h: Tensor) -> Tensor:
    return (F.pad(h, (0, 0, 3, 0)).unfold(1, 4, 1) * m.convolution.weight[:, 0]).sum(-1)


def checkpointed_flip(m: Moving, h: Tensor) -> Tensor:
    return checkpoint(lambda x: x.flip(1).tanh(), h, use_reentrant=False)  # type: ignore[return-value]


def copied(m: Moving, h: Tensor) -> Tensor:
    return torch.zeros_like(h).copy_(h.flip(1))


def added_to_view(m: Moving, h: Tensor) -> Tensor:
    x = h * 1
    x.view(-1, WIDTH).add_(F.pad(h, (0, 0, 1, -1))[0])
    return x


MOVES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "flip": lambda m, h: h.flip(1),
    "flip, convolved": lambda m, h: convolved(m, h.flip(1)),
    "flip, checkpointed": checkpointed_flip,
    "flip, copied": copied,
    "pads": of_pads,
    "slices": of_slices,
    "unfold": unfolded,
    "roll": lambda m, h: h.roll(1, 1),
    "next": lambda m, h: h + F.pad(h[:, 1:], (0, 0, 0, 1)),
    "added to a view": added_to_view,
}


@pytest.mark.shared
@pytest.mark.parametrize("move", MOVES)
def test_tokens_that_are_moved_into_a_state_that_is_reset_are_refused(move: str) -> None:
    refusals = explained(Moving(MOVES[move]), reset_states=True).refusals
    assert {refusal.reason for refusal in refusals} == {cp.Reason.TOKEN_MIXING}
    for refusal in refusals:
        assert "test_recurrences.py" in str(refusal)
        assert all(
            way in refusal.detail for way in ("as conv1d", "pass the packing's offsets", "leave reset_states out")
        )


IN_ORDER: dict[str, Moving] = {
    "plain": Moving(lambda m, h: h),
    "convolution": Moving(convolved),
    "convolution of a roll": Moving(
        lambda m, h: F.conv1d(h.mT.roll(1, -1), m.convolution.weight, None, 1, 3, 1, WIDTH).mT[:, :-3]
    ),
    "features": Moving(lambda m, h: h.flip(2).roll(1, 2)),
    "behind all states": Moving(convolved, lambda h: h + h.flip(1) + F.pad(h, (0, 0, 1, -1))),
}


@pytest.mark.shared
@pytest.mark.parametrize("name", IN_ORDER)
def test_tokens_that_no_state_reads_may_be_moved(name: str) -> None:
    torch._dynamo.reset()
    sharding = cp.Sharding(2, TOKENS, PACKING, "balanced", reset_states=True)
    assert cp.check(IN_ORDER[name].double(), sharding, packed((5, 4, 20))).largest <= 1e-9


def test_states_with_offsets_read_moved_tokens_as_on_one_process() -> None:
    torch._dynamo.reset()
    model = Moving(MOVES["flip"])
    model.resets = True
    sharding = cp.Sharding(2, TOKENS, PACKING, "balanced", reset_states=True)
    assert cp.check(model.double(), sharding, packed((5, 4, 20))).largest <= 1e-9


def test_states_do_not_begin_anew_at_documents_of_trees() -> None:
    with pytest.raises(ValueError, match="one completion of a tree into the next"):
        cp.Sharding(2, {**TOKENS, "tree": 1}, cp.Tree("tree"), reset_states=True)


def explained(model: Any, **how: Any) -> Any:
    return cp.explain(model, cp.Sharding(2, TOKENS, PACKING, **how))(**packed((5, 1, 70)))


class Changed(RecurrentModel):
    """Its layers behind the first start anew at what `changes` make of the packing's offsets, each by its own."""

    def __init__(self, *changes: Callable[[Tensor], Tensor]) -> None:
        super().__init__(["ssd", *(KINDS[i % 2] for i in range(len(changes)))], resets=True)
        self.changes = changes

    def offsets(self, number: int, cu_seqlens: Tensor) -> Tensor:
        return self.changes[number - 1](cu_seqlens) if number else cu_seqlens


def written_copy(offsets: Tensor) -> Tensor:
    copy = offsets.clone()
    copy[1:].clamp_(min=3)
    return copy


COPIES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda o: o.long(),
    lambda o: o.to(torch.int32).contiguous(),
    lambda o: o[:].view(-1),
    lambda o: o.clone().flatten(),
    lambda o: o[None, :][0],
)
"""Changes that leave the packing's offsets as they are, one for one."""
OTHERS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda o: o.flip(0),
    lambda o: o[1:],
    lambda o: o[:-1].long(),
    lambda o: (o + 1).clamp(max=76),
    lambda o: o.to(torch.int8),
    written_copy,
)
"""Changes that give other offsets, or give them in a dtype that can't hold them all."""


class Written(RecurrentModel):
    """It writes over the packing's offsets before they are read."""

    def offsets(self, number: int, cu_seqlens: Tensor) -> Tensor:
        cu_seqlens[1] = 3
        return cu_seqlens


class Checkpointed(RecurrentModel):
    """Its layers are checkpointed; all but the first are given other offsets, if `shifted`."""

    shifted = False

    def layer(self, kind: str, number: int, h: Tensor, offsets: Tensor | None) -> Tensor:
        assert offsets is not None
        given = offsets.flip(0) if self.shifted and number else offsets
        return checkpoint(super().layer, kind, 0, h, given, use_reentrant=False)  # type: ignore[return-value]


class OfTokens(RecurrentModel):
    """Its documents lie in dim 0."""

    def layer(self, kind: str, number: int, h: Tensor, offsets: Tensor | None) -> Tensor:
        return super().layer(kind, number, h.transpose(0, 1), offsets).transpose(0, 1)


def test_offsets_that_were_written_over_are_refused() -> None:
    refusals = explained(Written(("ssd", "ssd"), resets=True)).refusals
    assert refusals
    assert {refusal.reason for refusal in refusals} <= {cp.Reason.MASK_WRONG_SOURCE, cp.Reason.TOKEN_MIXING}


@pytest.mark.parametrize("change", OTHERS)
def test_other_offsets_than_the_packings_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    refusals = explained(Changed(COPIES[0], change)).refusals
    assert {refusal.reason for refusal in refusals} == {cp.Reason.MASK_WRONG_SOURCE}
    assert refusals[0].node.name.startswith("kimi")


@pytest.mark.parametrize("checkpoints", [False, True])
def test_copies_of_the_packings_offsets_are_known(checkpoints: bool) -> None:
    model = Changed(*COPIES)
    if checkpoints:
        model.layer = partial(checkpoint, model.layer, use_reentrant=False)  # type: ignore[method-assign]
    torch._dynamo.reset()
    assert cp.check(model.double(), cp.Sharding(2, TOKENS, PACKING, "balanced"), packed((5, 1, 70))).largest <= 1e-9


@pytest.mark.parametrize("shifted", [False, True])
def test_checkpointed_layers_know_the_packings_offsets(shifted: bool) -> None:
    model = Checkpointed(("ssd", "ssd"), resets=True).double()
    model.shifted = shifted
    if shifted:
        assert {r.reason for r in explained(model).refusals} == {cp.Reason.MASK_WRONG_SOURCE}
        return
    sharding, batch = cp.Sharding(2, TOKENS, PACKING, "balanced"), packed((5, 1, 70))
    torch._dynamo.reset()
    assert cp.check(model, sharding, batch).largest <= 1e-9


def test_tokens_in_another_dim_are_refused() -> None:
    (refusal,) = explained(OfTokens(("ssd",))).refusals
    assert "without tokens in dim 1" in refusal.detail


class OfRow(RecurrentModel):
    """Its states decay by a mean over the row."""

    def layer(self, kind: str, number: int, h: Tensor, offsets: Tensor | None) -> Tensor:
        x, rate = h.unflatten(-1, (HEADS, DIM)), -h.mean((0, 1))[:HEADS].exp()
        return torch.ops.cp_rewrite.ssd(x, h[..., :HEADS].sigmoid(), rate, x[:, :, :1], x[:, :, 1:], offsets).flatten(2)


def test_rates_of_tokens_are_those_of_the_whole_row() -> None:
    torch._dynamo.reset()
    sharding = cp.Sharding(2, TOKENS, PACKING, "balanced")
    assert cp.check(OfRow(("ssd",)).double(), sharding, packed((5, 1, 70))).largest <= 1e-9


def test_padding_that_attention_leaves_out_goes_into_no_state() -> None:
    def mix(model: Any, h: Tensor, b: Any) -> Tensor:
        x, rate = h.unflatten(-1, (2, 8)), -torch.ones(2)
        return h + torch.ops.cp_rewrite.ssd(x, h[..., :2].sigmoid(), rate, x[:, :, :1], x[:, :, 1:], None).flatten(2)

    torch._dynamo.reset()
    sharding = cp.Sharding(2, border_model.TOKENS, cp.DocumentIds("doc_ids"), inner="eager")
    with pytest.raises(BackendCompilerFailed, match="carries padding into a document"):
        cp.check(border_model.Model(mix=mix), sharding, scans.between())


def test_without_resolve_states_are_refused() -> None:
    (refusal,) = explained(RecurrentModel(("ssd",)), resolve=False).refusals
    assert "needs resolve=True" in refusal.detail


@pytest.mark.sweep
def test_a_group_of_layers_is_benchmarked(tmp_path: Path) -> None:
    printed = run_line("torchrun --nproc-per-node 2 examples/bench/states.py --tiny --group", tmp_path)
    assert [line.split(" | ")[1] for line in printed.splitlines()] == ["3 documents", "one document"]
