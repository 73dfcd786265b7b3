"""The function of a graph must neither break it nor keep a rank's own values for the next step."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite import Reason
from tests.helpers.one_process import check_or_refuse
from tests.helpers.packed_model import TOKENS as PACKED_TOKENS
from tests.helpers.packed_model import WIDTH, PackedModel, packed_batch
from tests.helpers.pool import Pool

TOKENS = {"input_ids": 1, "doc_ids": 1}
BATCH = {"input_ids": torch.arange(64)[None] % 16, "doc_ids": torch.arange(64)[None] // 40}
seen: dict[str, Any] = {}


class Holder:
    """Any object that a model refers to."""

    value: Any = None


class Model(nn.Module):
    def __init__(self, keep: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.keep = keep
        self.value: Any = torch.zeros(())
        self.values: list[Any] = []
        self.holder = Holder()
        self.ordered: Any = OrderedDict()
        self.several: set[Any] = set()
        self.steps = 0
        self.limit = torch.ones(())

    def forward(self, input_ids: Tensor, doc_ids: Tensor) -> Tensor:
        if self.keep == "break before tokens":
            self.value = self.limit * 2
            torch._dynamo.graph_break()
        x = self.embed(input_ids).unflatten(-1, (2, 16)).transpose(1, 2)
        mask = (doc_ids[:, None, :, None] == doc_ids[:, None, None, :]).tril()
        loss = F.scaled_dot_product_attention(x, x, x, attn_mask=mask).square().sum()
        if self.keep == "attribute":
            self.value = loss.detach()
        elif self.keep == "per-token attribute":
            self.value = x.detach()
        elif self.keep == "list":
            self.values.append(loss.detach())
        elif self.keep == "dict in an object":
            self.holder.value = {"loss": [loss.detach()]}
        elif self.keep == "global":
            seen["loss"] = loss.detach()
        elif self.keep == "new object":
            holder = Holder()
            holder.value = loss.detach()
            self.values.append(holder)
        elif self.keep == "function":
            total = loss.detach()
            self.value = lambda: total
        elif self.keep == "dict of a class of its own":
            self.ordered["loss"] = loss.detach()
        elif self.keep == "set":
            self.several.add(loss.detach())
        elif self.keep == "number":
            self.steps += 1
        elif self.keep == "weights alone":
            self.value = self.limit * 2
        elif self.keep == "random":
            loss = loss * random.uniform(1, 2)
        elif self.keep == "vmap":
            loss = loss * torch.vmap(lambda x: x * torch.rand_like(x), randomness="different")(self.limit[None]).sum()
        elif self.keep == "break":
            torch._dynamo.graph_break()
            loss = loss * 2
        elif self.keep == "item":
            loss = loss * (doc_ids > 0).sum().item()
        return loss


def refusals_of(model: nn.Module, **options: Any) -> list[cp.Refusal]:
    report = cp.explain(model, cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), **options))(**BATCH)
    return list(report.refusals)


KEEP = ["attribute", "list", "dict in an object", "new object", "function", "dict of a class of its own", "set"]


@pytest.mark.parametrize("keep", [*KEEP, "global"])
def test_what_only_a_rank_knows_is_not_kept(keep: str) -> None:
    torch._dynamo.reset()
    (refusal,) = refusals_of(Model(keep), resolve=False)
    assert refusal.reason is Reason.TOKEN_MIXING
    assert "keeps what only this rank knows" in refusal.detail


@pytest.mark.parametrize("keep", ["nothing", "number", "weights alone", "per-token attribute", *KEEP])
def test_what_all_ranks_know_may_be_kept(keep: str) -> None:
    torch._dynamo.reset()
    assert not refusals_of(Model(keep))


def break_on(mesh: DeviceMesh, keep: str) -> list[tuple[Reason, str]]:
    sharding = cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids"), inner="eager")
    torch.manual_seed(0)
    with sharding.shard(BATCH) as local:
        try:
            torch.compile(Model(keep), backend=cp.backend(sharding))(**local)
        except cp.RewriteRefused as refused:
            return [(refusal.reason, refusal.detail) for refusal in refused.refusals]
    return []


@pytest.mark.parametrize("keep", ["break", "break before tokens", "item"])
def test_a_graph_break_is_refused_with_its_line(pool: Pool, keep: str) -> None:
    for found in pool.run(2, break_on, keep):
        (reason, detail), *_ = found
        assert reason is Reason.GRAPH_BREAK
        assert "test_frame.py:" in detail


@pytest.mark.parametrize("draws", ["random", "vmap"])
def test_random_numbers_of_python_and_inside_vmap_are_refused(draws: str) -> None:
    torch._dynamo.reset()
    assert Reason.DROPOUT in {refusal.reason for refusal in refusals_of(Model(draws))}


class OfKwargs(PackedModel):
    """Its `**kwargs` are Python's, made for the call: what is put in is gone behind it, unless something keeps them."""

    kept: Any = None

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        labels = kwargs.pop("labels")
        kwargs["hidden_states"] = self.embed(input_ids)
        kwargs["shifted"], kwargs["sorted"] = labels[:, 1:], torch.fft.fft(labels.double(), dim=1).real
        kwargs["length"] = input_ids.shape[1]
        loss = super().forward(
            input_ids, kwargs["position_ids"], kwargs.pop("doc_ids"), labels, kwargs["num_items"] * kwargs["length"]
        )
        if self.kept is not None:
            self.kept = lambda: kwargs
        return loss


def test_what_is_put_into_kwargs_is_not_kept() -> None:
    assert check_or_refuse(OfKwargs()) is None
    kept = OfKwargs()
    kept.kept = 0
    assert "_fft_r2c runs over the token dim" in str(check_or_refuse(kept))


class Stashing(PackedModel):
    """A router's logits are kept by a hook and an attribute, for a loss that balances experts."""

    reads = ""

    def extra(self) -> None:
        self.router, self.seen = nn.Linear(WIDTH, 4), list[Tensor]()
        self.router.register_forward_hook(lambda *given: self.seen.append(given[-1]))
        self.last: Any = torch.zeros(())
        self.logits: Any = None
        self.total: Any = None

    def mix(self, h: Tensor) -> Tensor:
        self.seen.clear()
        if self.reads:
            h = h * (1 + self.last.mean())
        if self.reads != "alone":
            self.last = self.router(h)
        self.logits = h
        return self.out(h) + h

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        self.total = super().loss(logits, labels, num_items)
        return self.total + sum(x.softmax(-1).mean((0, 1)).square().sum() for x in [*self.seen, self.logits])


def test_what_is_kept_may_be_read_in_the_same_call() -> None:
    assert check_or_refuse(Stashing(), tokens=23) is None


def test_what_a_call_kept_of_its_tokens_is_not_read_by_the_next() -> None:
    stashing = Stashing()
    stashing.reads = "before"
    assert "L['self'].last is read as what all ranks know" in str(check_or_refuse(stashing))


def keep_and_read(mesh: DeviceMesh) -> tuple[float, str]:
    batch, stashing = packed_batch(tokens=23), Stashing().double()
    sharding = cp.Sharding(mesh, PACKED_TOKENS, cp.DocumentIds("doc_ids"), inner="eager")
    compiled = torch.compile(stashing, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(batch) as local:
        compiled(**local).backward()
        total: Any = stashing.total
        stashing.reads = "alone"  # another graph, which keeps nothing there
        try:
            compiled(**local)
        except RuntimeError as error:
            return total.item(), str(error)
    return total.item(), ""


def test_kept_sums_are_whole_and_kept_tokens_are_an_error_to_other_graphs(pool: Pool) -> None:
    alone = Stashing().double()
    alone(**packed_batch(tokens=23))
    for total, error in pool.run(2, keep_and_read):
        assert total == pytest.approx(alone.total.item(), rel=1e-9)
        assert "L['self'].last is what an earlier call of a compiled model kept" in error


class Switching(PackedModel):
    """Keeps a weight, that of long rows or that of short ones, where nothing reads what it kept before."""

    def extra(self) -> None:
        self.short, self.long = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.now: nn.Parameter | None = None

    def mix(self, h: Tensor) -> Tensor:
        self.now = self.long if h.shape[1] > 10 else self.short
        return h * self.now


@pytest.mark.parametrize("tokens", [10, 14, 40])
def test_a_weight_that_is_kept_by_the_number_of_tokens_is_the_rows(tokens: int) -> None:
    assert check_or_refuse(Switching(), tokens=tokens) is None
