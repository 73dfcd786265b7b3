"""Masks of whole rows that come in as arguments: proven by what `shard` compared, on gloo against one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cp_rewrite as cp
from tests.helpers.pool import Pool

TOKENS = {"input_ids": 1, "position_ids": 1, "labels": 1}
BATCHES = [[13, 1, 7, 12], [5, 20]]
LOWEST = torch.finfo(torch.float32).min


def documents(lengths: Sequence[int]) -> cp.Documents:
    return cp.Documents.from_lengths(lengths)


def table(lengths: Sequence[int], **mask: Any) -> Tensor:
    """(1, T, T) bool."""
    return torch.from_numpy(cp.PackedMask(**mask).materialize(documents(lengths)))[None]


def blocks(lengths: Sequence[int]) -> Any:
    ids, total = torch.from_numpy(documents(lengths).document_ids()), sum(lengths)

    def keep(_: Tensor, __: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (ids[q] == ids[k]) & (q >= k)

    return create_block_mask(keep, None, None, total, total, device="cpu", BLOCK_SIZE=8)


MASKS: dict[str, Callable[[Sequence[int]], Any]] = {
    "torchtune": table,
    "copied for all heads": lambda n: table(n)[:, None].expand(1, 4, -1, -1),
    "of the row alone": lambda n: table(n)[0],
    "added": lambda n: torch.zeros(1, 1, sum(n), sum(n)).masked_fill(~table(n)[:, None], LOWEST),
    "-inf": lambda n: torch.zeros(1, 1, sum(n), sum(n)).masked_fill(~table(n)[:, None], -torch.inf),
    "numbers": lambda n: table(n)[:, None].long(),
    "what is hidden": lambda n: ~table(n),
    "by layers": lambda n: {"full": table(n), "window": table(n, window=(3, 0))},
    "documents only": lambda n: table(n, causal=False),
    "blocks": blocks,
}


class Model(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Two layers that read the mask as models do that are given one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.qkv = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, layer: int) -> Tensor:
        match self.kind:
            case "blocks":
                return flex_attention(q, k, v, block_mask=mask)  # type: ignore[return-value]
            case "by layers":
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask["window" if layer else "full"][:, None])
            case "numbers":
                return F.scaled_dot_product_attention(q, k, v, attn_mask=(1.0 - mask) * LOWEST)
            case "added":  # before anything has compared its size with that of tokens
                return ((q @ k.mT) * 8**-0.5 + mask[:, :, :, : k.shape[2]]).softmax(-1) @ v
            case "what is hidden":
                mask = ~mask
            case "documents only":
                mask = mask & torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
            case _:
                pass
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None] if mask.ndim == 3 else mask)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Any,
        shift_labels: Tensor,
        num_items_in_batch: Tensor,
        **_: Any,
    ) -> Tensor:
        x = self.embed(input_ids) + torch.sin(position_ids[..., None] / 9)
        for number, layer in enumerate(self.qkv):
            q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in layer(x).chunk(3, -1))
            x = x + self.attend(q, k, v, mask, number).transpose(1, 2).flatten(2)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), shift_labels.flatten(), reduction="sum")
        return loss / num_items_in_batch


def batch_of(kind: str, lengths: Sequence[int]) -> dict[str, Any]:
    total = sum(lengths)
    ids = torch.randint(0, 64, (1, total), generator=torch.Generator().manual_seed(total))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids, "mask": MASKS[kind](lengths)}


def annotation(mesh: DeviceMesh | int, kind: str) -> cp.Sharding:
    masks = {"by layers": {"window": cp.PackedMask(window=(3, 0))}, "documents only": {"mask": cp.PackedMask(False)}}
    return cp.Sharding(
        mesh, TOKENS, cp.PositionIds("position_ids"), inner="eager", masks=masks.get(kind, {}), verify="every_step"
    )


def train(model: nn.Module, loss_of: Callable[[dict[str, Any]], Tensor], kind: str) -> list[tuple[float, list[Tensor]]]:
    """(loss, gradients) of each batch. torch has no backward of flex_attention on CPUs."""
    found: list[tuple[float, list[Tensor]]] = []
    with torch.set_grad_enabled(kind != "blocks"):
        for lengths in BATCHES:
            model.zero_grad()
            loss = loss_of(batch_of(kind, lengths))
            if loss.requires_grad:
                loss.backward()
            found.append((loss.item(), [p.grad for p in model.parameters() if p.grad is not None]))
    return found


def train_as_rank(mesh: DeviceMesh, kind: str) -> list[tuple[float, list[Tensor]]]:
    sharding, model = annotation(mesh, kind), Model(kind)
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)

    def loss_of(batch: dict[str, Any]) -> Tensor:
        with sharding.shard(batch, shift_labels=True) as local:
            return compiled(**local)

    results: list[tuple[float, list[Tensor]]] = []
    for loss, grads in train(model, loss_of, kind):
        parts = torch.tensor(loss)
        for x in (parts, *grads):
            torch.distributed.all_reduce(x, group=sharding.group)
        results.append((float(parts), grads))
    return results


def train_alone(kind: str) -> list[tuple[float, list[Tensor]]]:
    model = Model(kind)

    def loss_of(batch: dict[str, Any]) -> Tensor:
        labels = F.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
        return model(**batch, shift_labels=labels, num_items_in_batch=(labels != -100).sum())

    return train(model, loss_of, kind)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "added" else [pytest.mark.slow]) for kind in MASKS]
)
def test_masks_that_come_in_are_the_plans(pool: Pool, kind: str) -> None:
    expected = train_alone(kind)
    for results in pool.run(2, train_as_rank, kind):
        for (loss, grads), (wanted, values) in zip(results, expected, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-5)
            for grad, value in zip(grads, values, strict=True):
                assert float((grad - value).norm() / value.norm()) <= 1e-5


def test_block_masks_that_come_in_are_proven() -> None:
    with torch.no_grad():
        report = cp.explain(Model("blocks"), annotation(2, "blocks"), shift_labels=True)
        found = report(**batch_of("blocks", BATCHES[0]))
    assert [site.mask for site in found.sites] == ["same document & causal"] * 2
    assert not found.refusals


def refuse(mesh: DeviceMesh, check_batches: bool) -> list[str]:
    """One rank's mask is wrong, in the second batch: every rank says so, and the next batch is cut."""
    sharding = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), check_batches=check_batches)
    said: list[str] = []
    for step in range(3):
        batch = batch_of("torchtune", [13, 1, 7, 12])
        batch["mask"][0, 20, 14] ^= step == 1 and sharding.rank == 1
        try:
            with sharding.shard(batch):
                said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("check_batches", [True, False])
def test_a_mask_that_is_wrong_on_one_rank_is_an_error_of_all(pool: Pool, check_batches: bool) -> None:
    for said in pool.run(2, functools.partial(refuse, check_batches=check_batches)):
        assert said[::2] == ["", ""]
        assert "does not let query 20 see key 14 in row 0" in said[1]
