"""Models that decide by the number of tokens decide for the row, at each length anew: right, or refused at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from tests.end_to_end.test_batches_in_turn import pack
from tests.helpers.one_process import check_all, check_or_refuse
from tests.helpers.packed_model import TOKENS, WIDTH, PackedModel, packed_batch
from tests.helpers.pool import Pool
from tests.helpers.versions import OLD

Mix = Callable[["Deciding", Tensor, int], Tensor]
"""(model, hidden states (B, T, C), T) -> hidden states; T is 24, of which a rank has 12."""


class Deciding(PackedModel):
    """It attends within a window where rows are longer than that."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def extra(self) -> None:
        self.more = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("table", torch.randn(64, 1))

    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> Tensor:
        mask, index = super().mask(h, doc_ids, position_ids, input_ids), torch.arange(h.shape[1])
        assert mask is not None
        return mask & (index[:, None] - index < 6) if h.shape[1] > 16 else mask

    def mix(self, h: Tensor) -> Tensor:
        for name in self.names:
            h = (RIGHT | REFUSED)[name](self, h, h.shape[1])
        return h


def of_chunks(m: Deciding, h: Tensor) -> Tensor:
    return torch.cat([m.out(x).tanh() for x in h.split(16, 1)], 1)


def in_a_loop(m: Deciding, h: Tensor, t: int) -> Tensor:
    for i in range(t // 6):
        h = h + i * m.out(h).tanh()
    return h


def in_place(m: Deciding, h: Tensor, t: int) -> Tensor:
    h = h * 1
    if t > 16:
        h.mul_(2)
        h[:, 0] = 0
    return h


def first_apart(m: Deciding, h: Tensor, most: int) -> Tensor:
    most = min(h.shape[1], most)
    return torch.cat([m.norm(h[:, :most]), h[:, most:]], 1)


def kept_on_it(m: Deciding, h: Tensor, t: int) -> Tensor:
    m.current = m.more if t > 16 else m.norm.weight
    return h * m.current


def written(m: Deciding, h: Tensor, place: int, value: Any) -> Tensor:
    h = h * 1
    h[:, place] = value
    return h


def by_heads(x: Tensor) -> Tensor:
    heads = x.reshape(x.shape[0], x.shape[1], 2, -1).softmax(-1)
    return heads.reshape(x.shape[0], x.shape[1], -1)


RIGHT: dict[str, Mix] = {
    "a_size_checked": lambda m, h, t: (torch._check(t > 8), h)[1],
    "comparisons_added": lambda m, h, t: h * (1 + (t > 16) + (t > 40)),
    "scaled": lambda m, h, t: h * (2 if t > 16 else 1),
    "mean": lambda m, h, t: h - h.mean(1, keepdim=True) if t > 16 else h,
    "for_shards_alone": lambda m, h, t: h if t > 16 else torch.fft.fft(h, dim=1).real,
    "shifted": lambda m, h, t: h + F.pad(h[:, :-1], (0, 0, 1, 0)) if t > 16 else h,
    "at_a_place": lambda m, h, t: h + h[:, 2:3] + h[:, -1:] if t > 16 else h,
    "divided": lambda m, h, t: h / t if t > 16 else h,
    "positions": lambda m, h, t: h * torch.arange(t)[:, None].sin() if t > 16 else h,
    "in_a_loop": in_a_loop,
    "in_place": in_place,
    "chunks": lambda m, h, t: of_chunks(m, h),
    "number_of_chunks": lambda m, h, t: torch.cat(c := [m.out(x) for x in h.split(5, 1)], 1) / len(c),
    "checkpointed": lambda m, h, t: checkpoint(lambda x: of_chunks(m, x), h, use_reentrant=False),  # type: ignore[return-value]
    "detached": lambda m, h, t: h + (m.out(h).detach() if t > 16 else m.out(h)),
    "more_than_a_shard": lambda m, h, t: h + h[:, :20].mean(1, keepdim=True) if t > 20 else h,
    "behind_the_shard": lambda m, h, t: h + h[:, 20:21] if t > 20 else h,
    "another_weight": lambda m, h, t: h * m.more if t > 16 else h,
    "a_table": lambda m, h, t: h * m.table[:t] if t > 16 else h,
    "by_thirds": lambda m, h, t: h * 2 if t % 3 == 0 else h + 1,
    "largest": lambda m, h, t: h + h.topk(15, 1).values.mean(1, keepdim=True) if t > 16 else h,
    "flat_chunks": lambda m, h, t: torch.cat([m.out(x.flatten(0, 1)).tanh() for x in h.split(7, 1)]).view(h.shape),
    "flat_sums": lambda m, h, t: h + torch.cat([m.out(x).mean(-1).flatten() for x in h.split(7, 1)]).sum() / t,
    "flat_chunks_summed": lambda m, h, t: (
        h + torch.cat([m.out(x.flatten(0, 1)).tanh() for x in h.split(7, 1)]).sum(dim=1).view(*h.shape[:2], 1)
    ),
    "chunks_of_fewer": lambda m, h, t: F.pad(torch.cat([m.out(x) for x in h[:, 1:].split(7, 1)], 1), (0, 0, 0, 1)),
    "added_chunks": lambda m, h, t: h + sum(x.sum(1, keepdim=True) for x in h.split(7, 1)) / t,
    "chunk_of_t": lambda m, h, t: torch.cat([m.out(x).tanh() for x in h.split(max(t // 3, 1), 1)], 1),
    "up_to_a_place": lambda m, h, t: h + h[:, : min(t, 20)].mean(1, keepdim=True),
    "as_a_value": lambda m, h, t: h * torch.where(torch.tensor(t > 16), 2.0, 3.0),
    "filled": lambda m, h, t: h * torch.full((1,), float(t > 16)) + h.new_tensor(t % 5 == 2),
    "filled_as_a_float": lambda m, h, t: (
        h * torch.full((t, 1), t / 7) + torch.full((1,), 1 / t) * torch.full((1,), t > 9)
    ),
    "logarithm": lambda m, h, t: h * math.log(t) if t > 16 else h,
    "scaled_as_yarn": lambda m, h, t: h * (0.1 * math.log(t / 8) + 1 if t > 8 else 1.0) * math.log(t, 16),
    "kept_from_the_end": lambda m, h, t: h + h[:, max(t - 20, 0) :].amax(1, keepdim=True) * max(t, 20),
    "of_functions_of_math": lambda m, h, t: (
        h * math.exp(-t / 100) * math.log1p(t) + math.pow(t, -0.5) * math.erf(t / 9)
    ),
    "decided_by_math": lambda m, h, t: h * 2 if math.exp(-t / 20) > 0.4 and math.log10(t) > 1.2 else h,
    "first_apart": lambda m, h, t: first_apart(m, h, 20),
    "last_apart": lambda m, h, t: torch.cat([m.norm(h[:, : max(t - 20, 0)]), h[:, max(t - 20, 0) :] * 2], 1),
    "apart_again": lambda m, h, t: first_apart(m, first_apart(m, h, 20), 30),
    "shifted_and_apart": lambda m, h, t: F.pad(first_apart(m, h[:, 1:], 20), (0, 0, 1, 0)),
    "features_apart": lambda m, h, t: (
        h + torch.cat([h[:, : min(t, 20), 2:5] * 2, h[:, min(t, 20) :, :3]], 1).sum(-1)[..., None]
    ),
    "weights_apart": lambda m, h, t: (
        h * torch.cat([torch.full((min(t, 20),), 2.0), torch.zeros(t - min(t, 20))])[:, None]
    ),
    "numbered_chunks": lambda m, h, t: torch.cat([x * 2**i - m.out(x) * i for i, x in enumerate(h.split(16, 1))], 1),
    "numbered_thirds": lambda m, h, t: torch.cat([i - x / (i + 1) for i, x in enumerate(h.chunk(3, 1))], 1),
    "by_turns": lambda m, h, t: torch.cat([m.out(h[:, i : i + 8]) for i in range(0, t, 8)], 1),
    "added_by_turns": lambda m, h, t: (
        h + sum((h[:, i : min(i + 8, t)] * i).sum(1)[:, None] for i in range(0, t, 8)) / t
    ),
    "beside_turns": lambda m, h, t: (
        torch.cat([m.out(h[:, i : i + 8]) for i in range(0, t, 8)], 1) + h[:, 8:10].mean(1, keepdim=True)
    ),
    "chunks_by_heads": lambda m, h, t: torch.cat([by_heads(x) for x in h.split(5, 1)], 1),
    "chunks_of_rows": lambda m, h, t: torch.cat(
        [m.out(x.reshape(x.shape[0] * x.shape[1], -1)).view(x.shape) for x in h.split(16, 1)], 1
    ),
    "thirds_of_rows": lambda m, h, t: torch.cat(
        [m.out(x.reshape(-1, x.size(-1))).unflatten(0, x.shape[:2]) for x in h.chunk(3, 1)], 1
    ),
    "behind_the_end": lambda m, h, t: torch.cat([h[:, :23] + m.out(h[:, 40:]).sum(1, keepdim=True), h[:, 23:] * 2], 1),
    "quantile": lambda m, h, t: h + h.quantile(0.3, 1, keepdim=True),
    "kept_on_it": kept_on_it,
    "a_place_written": lambda m, h, t: written(m, h, 20, m.out(h)[:, 3]) if t > 20 else h,
    "a_comparison_written": lambda m, h, t: written(m, h, 1, t > 14),
    "scalar_tensor": lambda m, h, t: h * torch.scalar_tensor(t > 16) + torch.empty(1).fill_(t > 20),
    "a_row_of_a_table": lambda m, h, t: h + m.table[t] * torch.tensor(t % 6 == 2),
}
if OLD:
    del RIGHT["filled"]  # torch makes no tensor of a comparison
REFUSED: dict[str, Mix] = {
    "transformed": lambda m, h, t: torch.fft.fft(h, dim=1).real if t > 16 else h,
    "chunks_of_a_row_of_places": lambda m, h, t: torch.cat([x * x.shape[1] for x in h.split(16, 1)], 1),
    "as_an_eps": lambda m, h, t: F.layer_norm(h, (WIDTH,), eps=1 / t),
    "as_an_eps_and_a_factor": lambda m, h, t: F.rms_norm(h * (t / 9), (WIDTH,), eps=t / 30),
    "chunks_turned": lambda m, h, t: torch.cat([h[:, i : i + 8].flip(1) for i in range(0, t, 8)], 1),
}


OF_ONE_ROW = {"weights_apart", "flat_chunks", "flat_chunks_summed"}
"""Refused where rows are several: entries that all ranks have are put together to as many as a row has; chunks of all
rows are joined one behind another."""


class Returning(Deciding):
    """Values that Python makes of the number of tokens beside the graph are of the row."""

    flag = 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        loss, long = super().forward(*args, **kwargs), kwargs["input_ids"].shape[1] > 16
        if self.names[0] == "flag":
            self.flag = 2 if long else 1
        if self.names[0] == "fewer":
            return loss if long else (loss, loss)
        return loss if self.names[0] == "flag" else (loss, 3 if long else 2)

    def mix(self, h: Tensor) -> Tensor:
        return h


def test_some_are_right() -> None:
    names = ("scaled", "mean", "chunks", "checkpointed", "apart_again", "weights_apart", "of_functions_of_math")
    names += ("by_turns", "filled_as_a_float", "beside_turns", "numbered_thirds", "chunks_by_heads", "behind_the_end")
    assert check_or_refuse(Deciding(*names), tokens=33) is None


def test_a_number_of_which_torch_makes_a_plain_one_is_refused() -> None:
    """It would be a rank's, and no op shows it."""
    said = check_or_refuse(Deciding("as_an_eps"), tokens=24)
    assert said is not None
    assert "eps=1 / t" in said
    assert "POSITION_GENERATOR" in said


@pytest.mark.parametrize("name", ["number", "fewer", "flag"])
def test_what_is_returned_and_kept_is_the_rows(name: str) -> None:
    assert check_or_refuse(Returning(name), tokens=24) is None


class WindowWhereLong(PackedModel):
    """Causal attention, within a window where the row is longer: the token count is read where a shard's trace has
    none."""

    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> None:
        return None

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        tokens = q.shape[2]
        if tokens <= 12:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        behind = torch.arange(tokens)[:, None] - torch.arange(tokens)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(behind >= 0) & (behind <= 12))


@pytest.mark.parametrize(("ranks", "tokens"), [(4, 47), (8, 53)])
def test_a_window_that_a_shard_does_not_reach(ranks: int, tokens: int) -> None:
    torch._dynamo.reset()
    model, sharding = WindowWhereLong().double(), cp.Sharding(ranks, TOKENS, cp.WholeRows())
    assert cp.check(model, sharding, packed_batch(1, tokens)).largest <= 1e-9


class MaskOfAFunction(PackedModel):
    """Its mask is a function of (head, query, key), as transformers' are, mapped over all of them; it reads no head."""

    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> Tensor:
        d, i = doc_ids[0], torch.arange(h.shape[1])
        keep = torch.vmap(lambda head, q, k: (d[q] == d[k]) & (k <= q), in_dims=(None, None, 0))
        mapped = torch.vmap(torch.vmap(keep, in_dims=(None, 0, None)), in_dims=(0, None, None))
        return mapped(torch.arange(h.shape[1]), i, i)[:1]


def test_a_mask_of_a_function_that_reads_no_head() -> None:
    """Nodes of the map that are left in the graph have no memory whose size could be a rank's."""
    assert check_or_refuse(MaskOfAFunction(), tokens=23) is None


class Turned(nn.Module):
    """Rows of a table at each position, in the sizes of the hidden states: `view(-1, T, …)`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.register_buffer("table", torch.rand(64, 2))

    def turned(self, x: Tensor, pos: Tensor) -> Tensor:
        by, x = self.table[pos].view(-1, x.shape[1], 1, 1, 2), x.unflatten(-1, (-1, 2))
        return torch.stack([(x * by).sum(-1), x[..., 1] * by[..., 0]], -1).flatten(3)

    def forward(self, ids: Tensor, pos: Tensor) -> Tensor:
        h = self.embed(ids)
        heads = h.view(*h.shape[:2], 2, 8)
        q, v = self.turned(heads, pos).transpose(1, 2), heads.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, q, v, is_causal=True)
        return out.transpose(1, 2).contiguous().view(*h.shape[:2], -1).square().sum()


def test_sizes_of_one_argument_hold_for_what_another_gives() -> None:
    torch._dynamo.reset()
    sharding = cp.Sharding(2, {"ids": 1, "pos": 1}, cp.WholeRows(), inner="eager")
    batch = {"ids": torch.arange(31)[None] % 16, "pos": torch.arange(31)[None]}
    assert cp.check(Turned().double(), sharding, batch).largest <= 1e-9


def test_lengths_are_tried_beforehand() -> None:
    sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), "head_tail")
    report = cp.explain(Deciding("transformed"), sharding, lengths=[14, 20])(**packed_batch(1, 24))
    assert report.refusals
    assert not report.lengths[14]
    assert [refusal.reason for refusal in report.lengths[20]] == [cp.Reason.TOKEN_MIXING]
    assert "rows of 20 tokens: refused" in str(report)
    assert not report.ok


class OfTypes(PackedModel):
    """It adds an embedding of what it gets beside its tokens, as BERT does."""

    def forward(self, types: Tensor, **batch: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(**batch) + self.head(self.embed(batch["input_ids"]) + self.embed(types)).square().sum()


@pytest.mark.parametrize("rows", [1, 2])
def test_an_argument_that_fixes_the_number_of_tokens_is_named(rows: int) -> None:
    """torch makes the row as long as what no annotation says to be a row."""
    batch, sharding = packed_batch(rows, 24), cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"))
    (refusal,) = cp.explain(OfTypes(), sharding)(**batch, types=torch.zeros(rows, 24, dtype=torch.long)).refusals
    assert refusal.reason is cp.Reason.TOKEN_INPUT
    assert "types has a dim as long as the tokens but is not named in tokens" in str(refusal)


@pytest.mark.parametrize("length", [0, 25, 3.5])
def test_lengths_that_a_batch_does_not_have(length: Any) -> None:
    explain = cp.explain(Deciding(), cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids")), lengths=[length])
    with pytest.raises(ValueError, match="lengths must be whole numbers from 1 to the batch's 24 tokens"):
        explain(**packed_batch(1, 24))


def test_a_refusal_at_a_later_batch_names_the_length(pool: Pool) -> None:
    for said in pool.run(2, _refused_later):
        assert "this row has 24 tokens, and rows of 14 were right" in said


def _refused_later(mesh: DeviceMesh) -> str:
    sharding = cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids"), inner="eager")
    torch._dynamo.reset()
    model = torch.compile(Deciding("transformed"), backend=cp.backend(sharding), fullgraph=True)
    for tokens in (14, 24):
        with sharding.shard(packed_batch(1, tokens)) as local:
            try:
                model(**local)
            except cp.RewriteRefused as refused:
                return str(refused)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", [*RIGHT, *REFUSED])
def test_decisions_are_the_rows(name: str, rows: int) -> None:
    refused = name in REFUSED or (rows > 1 and name in OF_ONE_ROW)
    assert (check_or_refuse(Deciding(name), rows, 24) is None) == (not refused)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", [name for name in RIGHT if name != "for_shards_alone"])
def test_lengths_in_turn(name: str, ranks: int) -> None:
    """Nothing is refused, or wrong, later than at the first length, nor where a last chunk has one token. (The left out
    one sorts short rows.)"""
    torch._dynamo.reset()
    sharding = cp.Sharding(ranks, TOKENS, cp.DocumentIds("doc_ids"), "head_tail")
    batches = [pack(lengths) for lengths in ([5, 4, 5], [20, 4], [16, 1], [20, 1], [6, 1, 3, 8], [30, 20, 9])]
    for report in check_all(Deciding(name).double(), sharding, batches):
        assert report.largest <= 1e-7, str(report)


class Offsets(PackedModel):
    """Its mask repeats each document's number as often as it has tokens, without saying how many these are."""

    def __init__(self, repeat: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.repeat = repeat

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor, labels: Tensor, num_items: Tensor) -> Tensor:  # type: ignore[override]
        ids, total = self.repeat(cu_seqlens.diff()), input_ids.shape[1]
        mask = (ids[:, None] == ids) & torch.ones(total, total, dtype=torch.bool).tril()
        return self.loss(self.head(self.attended(self.embed(input_ids), mask[None, None])), labels, num_items)


@pytest.mark.parametrize(
    "repeat",
    [
        torch.repeat_interleave,
        lambda n: torch.repeat_interleave(torch.arange(len(n)), n),
        lambda n: torch.arange(len(n)).repeat_interleave(n, 0),
    ],
)
def test_documents_are_repeated_to_as_many_as_the_row_has(repeat: Callable[[Tensor], Tensor]) -> None:
    batch = {name: value for name, value in packed_batch(1, 13).items() if name in ("input_ids", "labels", "num_items")}
    batch["cu_seqlens"] = torch.tensor([0, 5, 9, 13])
    sharding = cp.Sharding(2, {"input_ids": 1, "labels": 1}, cp.CuSeqlens("cu_seqlens"), "head_tail")
    torch._dynamo.reset()
    assert cp.check(Offsets(repeat).double(), sharding, batch).largest <= 1e-9
