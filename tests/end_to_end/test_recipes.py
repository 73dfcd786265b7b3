"""docs/guides/code_bases.md: other code bases' models, as they are, on two gloo processes against one."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import cp_rewrite as cp
from tests.helpers.gpts import ROW, VOCAB, NanoChat, NanoGPT
from tests.helpers.one_process import assert_gradients, gradients_of
from tests.helpers.pool import Pool

END = 5
Result = tuple[float, dict[str, Tensor]]


def rows_of(total: int) -> dict[str, Any]:
    """Two rows, as data loaders of single-file trainers make them: targets are the next tokens."""
    ids = torch.randint(0, VOCAB, (2, total + 1), generator=torch.Generator().manual_seed(total))
    return {"idx": ids[:, :-1].contiguous(), "targets": ids[:, 1:].masked_fill(ids[:, 1:] == END, -1)}


def labelled_rows(total: int) -> dict[str, Any]:
    """The same for losses outside of the model: rows that fill a rank up hold -100 in what is called labels."""
    batch = rows_of(total)
    return {"idx": batch["idx"], "labels": batch["targets"].masked_fill(batch["targets"] < 0, -100)}


def own_loss(outputs: Any, batch: dict[str, Any]) -> Tensor:
    return outputs[1]


def sum_of_labels(logits: Any, batch: dict[str, Any]) -> Tensor:
    """A part of the batch's mean, for models that return logits."""
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="sum")


@dataclass(frozen=True)
class Recipe:
    """`loss`: of what the model returned for a batch, cut or whole. `parts`: it is a sum over a rank's tokens.
    `trains`: torch has no backward of flex_attention on CPUs."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]] = rows_of
    loss: Callable[[Any, dict[str, Any]], Tensor] = own_loss
    tokens: dict[str, int] = field(default_factory=lambda: {"idx": 1, "targets": 1})
    packing: Any = field(default_factory=cp.WholeRows)
    drop: Sequence[str] = ()
    parts: bool = False
    trains: bool = True
    limit: float = 1e-5


def litgpt() -> nn.Module:
    config = importlib.import_module("litgpt.config")
    return importlib.import_module("litgpt.model").GPT(
        config.Config(
            block_size=ROW, vocab_size=VOCAB, n_layer=2, n_head=4, n_query_groups=2, n_embd=32, rotary_percentage=1.0
        )
    )


def torchtitan(attention: str) -> nn.Module:
    if not torch.cuda.is_available():  # its experts' kernels are of triton
        sys.modules.setdefault("torchtitan.distributed.minimal_async_ep.kernels", MagicMock())
    config = importlib.import_module("torchtitan.models.llama3")._debugmodel(attention)
    config.layers = config.layers[:2]
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model


def packed(attention: str) -> Callable[[int], dict[str, Any]]:
    """Packed rows and torchtitan's own masks of them: a BlockMask, or VarlenMetadata."""

    def batch(total: int) -> dict[str, Any]:
        ids = torch.randint(0, VOCAB, (1, total), generator=torch.Generator().manual_seed(total))
        positions = torch.cat([torch.arange(n) for n in (13, 1, total - 14)])[None]
        labels = F.pad(ids[:, 1:], (0, 1), value=-100).masked_fill(F.pad(positions[:, 1:], (0, 1)) == 0, -100)
        masks = torchtitan(attention).get_attention_masks(positions)  # type: ignore[operator]
        found = {"tokens": ids, "positions": positions, "labels": labels, "attention_masks": masks}
        return found if attention == "flex" else found | {"cu_seq_q": masks.cu_seq_q}

    return batch


class Words:
    """A tokenizer: letters, between a token that begins a document and one that ends it."""

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        return [1] * add_bos + [3 + ord(letter) % 50 for letter in text] + [2] * add_eos


def read(attention: str, rows: int) -> Callable[[int], dict[str, Any]]:
    """Rows of torchtitan's own data set: documents from begin to end token, cut where a row is full."""

    def batch(total: int) -> dict[str, Any]:
        from datasets import Dataset

        texts = importlib.import_module("torchtitan.hf_datasets.text_datasets")
        documents = Dataset.from_dict({"text": ["dolphin" * n for n in (3, 1, 2, 9, 1, 1, 4, 2, 5, 3)]})
        found = (None, lambda _: documents, lambda sample: sample["text"])
        with patch.object(texts, "_validate_dataset", lambda *_: found):
            made = list(itertools.islice(texts.HuggingFaceTextDataset("texts", None, Words(), total), rows))
        positions = torch.stack([inputs["positions"] for inputs, _ in made])
        batch = {
            "tokens": torch.stack([inputs["input"] for inputs, _ in made]), "positions": positions,
            "labels": torch.stack([labels for _, labels in made]),
            "attention_masks": torchtitan(attention).get_attention_masks(positions),  # type: ignore[operator]
        }  # fmt: skip
        return batch if attention == "flex" else batch | {"cu_seq_q": batch["attention_masks"].cu_seq_q}

    return batch


TITAN = {"tokens": 1, "positions": 1, "labels": 1}
RECIPES = {
    "nanoGPT": Recipe(NanoGPT),
    "nanochat": Recipe(NanoChat),
    "litgpt": Recipe(
        litgpt, labelled_rows, sum_of_labels, {"idx": 1, "labels": 1}, drop=("labels",), parts=True
    ),
    "torchtitan flex": Recipe(
        lambda: torchtitan("flex"), packed("flex"), sum_of_labels, TITAN, cp.PositionIds("positions"), ("labels",),
        parts=True, trains=False,
    ),
    "torchtitan varlen": Recipe(
        lambda: torchtitan("varlen"), packed("varlen"), sum_of_labels, TITAN, cp.CuSeqlens("cu_seq_q"),
        ("labels", "cu_seq_q"), parts=True, limit=2e-2,  # attention in bfloat16
    ),
    "torchtitan varlen documents": Recipe(
        lambda: torchtitan("varlen"), read("varlen", 1), sum_of_labels, TITAN, cp.CuSeqlens("cu_seq_q"),
        ("labels", "cu_seq_q"), parts=True, limit=2e-2,
    ),
    "torchtitan flex documents": Recipe(
        lambda: torchtitan("flex"), read("flex", 2), sum_of_labels, TITAN, cp.PositionIds("positions"), ("labels",),
        parts=True, trains=False,
    ),
}  # fmt: skip


def plain_varlen(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, *_: Any, **__: Any) -> Tensor:
    """varlen_attn, which has no kernel on CPUs, of (T, H, D)."""
    parts = [x.split(cu.diff().tolist()) for x in (q, k, v)]
    outs = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part), is_causal=True)
        for part in zip(*parts, strict=True)
    ]
    return torch.cat([x.transpose(0, 1) for x in outs])


def built(recipe: Recipe) -> nn.Module:
    torch.manual_seed(0)
    return recipe.build().requires_grad_(recipe.trains)


def step(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    if loss.requires_grad:
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train_alone(name: str, total: int) -> Result:
    recipe = RECIPES[name]
    model, batch = built(recipe), recipe.batch(total)
    if name.startswith("torchtitan varlen"):
        vars(importlib.import_module("torchtitan.models.common.attention"))["varlen_attn"] = plain_varlen
    outputs = model(**{key: value for key, value in batch.items() if key not in recipe.drop})
    loss = recipe.loss(outputs, batch)
    return loss.item(), step(model, loss)


def train_as_rank(mesh: DeviceMesh, name: str, total: int) -> Result:
    recipe = RECIPES[name]
    model, batch = built(recipe), recipe.batch(total)
    sharding = cp.Sharding(mesh, recipe.tokens, recipe.packing, inner="eager")
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(batch) as local:
        outputs = compiled(**{key: value for key, value in local.items() if key not in recipe.drop})
        loss = recipe.loss(outputs, local)
    grads = step(model, loss)
    cp.sum_gradients(model.parameters(), sharding)
    if recipe.parts:
        torch.distributed.all_reduce(loss := loss.detach(), group=sharding.group)
    return loss.item(), {key: value.clone() for key, value in grads.items()}


@pytest.mark.slow
@pytest.mark.parametrize("total", [64, 51])
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_equal_one_process(pool: Pool, name: str, total: int) -> None:
    if name.split()[0] in ("litgpt", "torchtitan"):
        pytest.importorskip(name.split()[0])
    limit = RECIPES[name].limit
    loss, grads = train_alone(name, total)
    for found, theirs in pool.run(2, train_as_rank, name, total):
        assert found == pytest.approx(loss, rel=limit)
        assert_gradients(theirs, grads, limit)


def steps_alone(name: str, totals: Sequence[int]) -> list[Result]:
    recipe = RECIPES[name]
    model, found = built(recipe), list[Result]()
    if name.startswith("torchtitan varlen"):
        vars(importlib.import_module("torchtitan.models.common.attention"))["varlen_attn"] = plain_varlen
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for total in totals:
        batch = recipe.batch(total)
        outputs = model(**{key: value for key, value in batch.items() if key not in recipe.drop})
        loss = recipe.loss(outputs, batch) / total
        loss.backward()
        found.append((loss.item(), gradients_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def steps_as_rank(mesh: DeviceMesh, name: str, totals: Sequence[int]) -> list[Result]:
    """With FSDP2, block by block."""
    recipe, found = RECIPES[name], list[Result]()
    sharding = cp.Sharding(mesh, recipe.tokens, recipe.packing, inner="eager")
    torch._dynamo.reset()
    model = cp.parallelize(built(recipe), mesh, sharding)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for total in totals:
        with sharding.shard(recipe.batch(total)) as local:
            outputs = model(**{key: value for key, value in local.items() if key not in recipe.drop})
            loss = recipe.loss(outputs, local) / total
        loss.backward()
        grads = {n: p.grad.full_tensor() for n, p in model.named_parameters() if isinstance(p.grad, DTensor)}
        torch.distributed.all_reduce(loss := loss.detach(), group=sharding.group)
        found.append((loss.item(), grads))
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchtitan varlen documents", "litgpt"])
def test_recipes_under_fsdp_equal_one_process(pool: Pool, name: str) -> None:
    pytest.importorskip(name.split()[0])
    expected, limit = steps_alone(name, [64, 51]), RECIPES[name].limit
    for found in pool.run(2, steps_as_rank, name, [64, 51]):
        for (loss, grads), (their_loss, theirs) in zip(expected, found, strict=True):
            assert their_loss == pytest.approx(loss, rel=limit)
            assert_gradients(theirs, grads, limit)


def test_nanochats_smear_may_be_written_as_one_shift() -> None:
    model, other = NanoChat(published=True), NanoChat()
    other.load_state_dict(model.state_dict())
    batch = rows_of(20)
    for mine, theirs in zip(model(**batch), other(**batch), strict=True):
        torch.testing.assert_close(mine, theirs)
