"""Tensors of `shard` are this rank's tokens to user code, and as long as the row to Dynamo."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from cp_rewrite.batch.as_row import AsRow, as_row, to_local
from tests.helpers.packed_model import TOKENS, WIDTH, PackedModel, packed_batch
from tests.helpers.pool import Pool

SHARDING = cp.Sharding(2, {"ids": 1, "x": 1, "doc_ids": 1}, cp.DocumentIds("doc_ids"), "contiguous", inner="eager")
BATCH = {
    "ids": torch.arange(23)[None] % 7,
    "x": torch.randn(1, 23, 4, generator=torch.Generator().manual_seed(0)),
    "doc_ids": torch.arange(23)[None] // 9,
}
OWN = 12
"""Tokens of a rank."""


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return g * 2


def saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


LOOKS: list[Callable[[Tensor], Any]] = [
    lambda x: x.shape[1],
    lambda x: x.size(1),
    lambda x: x.numel(),
    lambda x: x.stride(0),
    lambda x: x.untyped_storage().nbytes() // x.element_size(),
    lambda x: len(x.tolist()[0]),
    lambda x: x.numpy().shape[1],
    lambda x: torch.from_dlpack(x).shape[1],
    lambda x: pickle.loads(pickle.dumps(x)).shape[1],
    lambda x: copy.deepcopy(x).shape[1],
    lambda x: saved(x).shape[1],
    lambda x: torch.zeros_like(x).shape[1],
    lambda x: torch.where(x > 3, x, 0).sum(0).shape[0],
    lambda x: x[:, None].expand(-1, 5, -1).shape[2],
    lambda x: F.one_hot(x, 7).shape[1],
    lambda x: x.to(torch.int32).contiguous().clone().shape[1],
]


@pytest.mark.parametrize("look", LOOKS)
def test_user_code_sees_a_ranks_tokens(look: Callable[[Tensor], Any]) -> None:
    with SHARDING.shard(BATCH) as local:
        assert look(local["ids"]) == OWN


def test_ops_keep_the_look_where_tokens_stay() -> None:
    with SHARDING.shard(BATCH) as local:
        ids, x = local["ids"], local["x"]
        for kept in (ids + 1, x * 2, x.masked_fill(x > 0, 0.0), ids.clone(), x.float(), x.add_(1)):
            assert type(kept) is AsRow
            assert kept.shape[1] == OWN
        for other in (ids[:, :3], ids.flatten(), x.sum(), x.mT, ids[:, None]):
            assert type(other) is Tensor


def test_what_a_caller_changes_is_what_the_model_gets() -> None:
    def model(ids: Tensor, x: Tensor, doc_ids: Tensor) -> Tensor:
        return x.sin() * ids[..., None] / ids.shape[1] + (doc_ids if doc_ids.shape[1] > OWN else -doc_ids)[..., None]

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=cp.backend(SHARDING), fullgraph=True)
    for edit in (lambda x: x.mul_(2), lambda x: x[:, 0].zero_(), lambda x: x.requires_grad_(), lambda x: x.neg()):
        whole = {name: value.clone() for name, value in BATCH.items()}
        changed = edit(whole["x"])
        whole["x"] = changed if changed.shape == whole["x"].shape else whole["x"]
        expected = model(**whole)[:, :OWN]
        with SHARDING.shard({name: value.clone() for name, value in BATCH.items()}) as local:
            changed = edit(local["x"])
            local["x"] = changed if changed.shape == local["x"].shape else local["x"]
            out = compiled(**local)
            torch.testing.assert_close(out, expected)
            if local["x"].requires_grad:
                out.sum().backward()
                expected.sum().backward()
                torch.testing.assert_close(local["x"].grad, whole["x"].grad[:, :OWN])  # type: ignore[index]


def test_leaves_that_callers_made_take_batches_of_all_lengths() -> None:
    """One graph for all, as without gradients: keys and values that are given beside queries are such leaves."""

    def model(ids: Tensor, x: Tensor, doc_ids: Tensor) -> Tensor:
        return x.sin() * ids[..., None] + doc_ids[..., None]

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend=cp.backend(SHARDING), fullgraph=True)
    for tokens in (23, 30, 17):
        batch = {"ids": torch.ones(1, tokens), "x": torch.ones(1, tokens, 4), "doc_ids": torch.zeros(1, tokens).long()}
        with SHARDING.shard(batch) as local:
            local["x"].requires_grad_()
            assert compiled(**local).shape == (1, (tokens + 1) // 2, 4)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_another_backend_compiles_takes_the_tensor_itself(backend: str) -> None:
    def loss(x: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(x.flatten(0, 1), ids.flatten() % 4, reduction="sum") / ids.shape[1]

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=backend)
    with SHARDING.shard(BATCH) as local:
        x, ids = local["x"], local["ids"]
        with pytest.raises(Exception, match=r"another backend of torch\.compile compiles"):  # torch wraps it
            compiled(x.flatten(1).unflatten(1, (-1, 4)), ids)
        torch.testing.assert_close(compiled(to_local(x), ids.local), loss(x, ids))


@pytest.mark.parametrize("call", [Doubled.apply, lambda x: checkpoint(torch.sin, x, use_reentrant=True)])
def test_a_gradient_that_no_op_sees_is_an_error(call: Callable[[Tensor], Tensor]) -> None:
    with SHARDING.shard(BATCH) as local:
        x = local["x"].requires_grad_()
        with pytest.raises(TypeError, match="was applied to a tensor of the batch outside of the model"):
            call(x).sum()
        call(to_local(x)).sum().backward()
        assert x.grad is not None


def test_rows_that_a_rank_holds_whole_are_plain() -> None:
    x = torch.ones(1, 5)
    assert as_row(x, (1,), 5) is x
    assert type(as_row(x, (1,), 9)) is AsRow


class WithGiven(PackedModel):
    def forward(self, given: Tensor, **b: Any) -> Any:  # type: ignore[override]
        h = self.embed(b["input_ids"]) + given
        h = self.attended(h, self.mask(h, b["doc_ids"], b["position_ids"], b["input_ids"]))
        return F.cross_entropy(self.head(h).flatten(0, 1), b["labels"].flatten(), reduction="sum") / b["num_items"]


def with_given() -> tuple[WithGiven, dict[str, Tensor]]:
    given = torch.randn(1, 23, WIDTH, generator=torch.Generator().manual_seed(3))
    return WithGiven(), {**packed_batch(1, 23), "given": given.requires_grad_()}


def gradients_under(mesh: DeviceMesh, data_parallel: Any) -> tuple[Tensor, Tensor]:
    """Gradients of embeddings that are handed in, and of the model's own table."""
    model, batch = with_given()
    sharding = cp.Sharding(mesh, {**TOKENS, "given": 1}, cp.DocumentIds("doc_ids"), inner="eager")
    parallel = cp.parallelize(model, mesh, sharding, data_parallel=data_parallel)
    with sharding.shard(batch) as local:
        parallel(**local).backward()
    table: Any = model.embed.weight.grad
    table = table.full_tensor() if data_parallel == "fsdp" else table
    given: Any = batch["given"].grad
    torch.distributed.all_reduce(given, group=sharding.group)
    return given / (1 if data_parallel == "fsdp" else mesh.size()), table


@pytest.mark.parametrize("data_parallel", ["fsdp", "ddp"])
def test_embeddings_that_take_a_gradient(pool: Pool, data_parallel: str) -> None:
    model, batch = with_given()
    model(**batch).backward()
    for given, table in pool.run(2, gradients_under, data_parallel):
        torch.testing.assert_close(given, batch["given"].grad)
        torch.testing.assert_close(table, model.embed.weight.grad)
