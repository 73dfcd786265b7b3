"""Arguments that trainers call models with, as `Sharding.shard` takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cp_rewrite as cp
from cp_rewrite.integrations.forward import global_batch

TOKENS = {"input_ids": 1, "position_ids": 1, "labels": 1}
SHARDING = cp.Sharding(2, TOKENS, cp.PositionIds("position_ids"))
BY_IDS = cp.Sharding(2, {"input_ids": 1, "doc_ids": 1}, cp.DocumentIds("doc_ids"))


def batch_of(*masks: list[int], **others: Any) -> dict[str, Any]:
    mask = torch.tensor(masks)
    return {"input_ids": torch.ones_like(mask), "attention_mask": mask, "labels": None, **others}


def positions(batch: dict[str, Any], places: bool = True) -> tuple[list[list[int]], list[list[int]] | None]:
    found, sharding, lengths = global_batch(batch, SHARDING, places=places, unpads=places)
    assert sharding == SHARDING
    assert "attention_mask" not in found
    assert "labels" not in found
    value: Tensor = found["position_ids"]
    return value.tolist(), lengths


def test_padding_is_in_no_document() -> None:
    found = positions(batch_of([1, 1, 1, 0, 0], [1, 1, 1, 1, 1]))
    assert found == ([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]], [[3], [5]])


def test_rows_without_a_mask_are_documents() -> None:
    assert positions({"input_ids": torch.ones(2, 3)}) == ([[0, 1, 2], [0, 1, 2]], None)


def test_position_ids_stay() -> None:
    packed = torch.tensor([[0, 1, 0, 1, 2]])
    found = positions({"input_ids": torch.ones(1, 5), "position_ids": packed}, places=False)
    assert found == (packed.tolist(), None)


def test_position_ids_that_agree_with_the_mask_stay() -> None:
    given = torch.tensor([[0, 1, 2, 1, 1]])
    assert positions(batch_of([1, 1, 1, 0, 0], position_ids=given)) == ([[0, 1, 2, 0, 1]], [[3]])


@pytest.mark.parametrize("places", [False, True])
def test_a_mask_stays_as_it_is(places: bool) -> None:
    batch = batch_of([1, 1, 1, 0, 0])
    found, sharding, lengths = global_batch(batch, SHARDING, places=places)
    assert found.keys() == {"input_ids", "attention_mask", *["position_ids"] * places}
    assert found["attention_mask"] is batch["attention_mask"]
    assert not places or found["position_ids"].tolist() == [[0, 1, 2, 3, 4]]
    assert sharding.packing == cp.PaddingMask("attention_mask")
    assert sharding.tokens == {
        "input_ids": 1,
        "labels": 1,
        "attention_mask": 1,
        **({"position_ids": 1} if places else {}),
    }
    assert lengths is None


def test_models_that_count_positions_themselves_get_none() -> None:
    found, sharding, _ = global_batch({"input_ids": torch.ones(2, 3)}, SHARDING, places=False)
    assert found.keys() == {"input_ids"}
    assert (sharding.packing, sharding.tokens) == (cp.WholeRows(), {"input_ids": 1, "labels": 1})


def test_what_padding_free_collators_derive_is_left_out() -> None:
    derived = {"cu_seq_lens_q": torch.tensor([0, 5]), "max_length_q": 5, "seq_idx": torch.zeros(1, 5)}
    batch = {"input_ids": torch.ones(1, 5), **derived, "use_cache": False}
    found = global_batch(batch, SHARDING, places=True).values
    assert found.keys() == {"input_ids", "position_ids", "use_cache"}


def test_what_the_sharding_names_is_kept() -> None:
    by_sums = cp.Sharding(2, {"input_ids": 1, "seq_idx": 1}, cp.CuSeqlens("cu_seq_lens_q"))
    derived = {"cu_seq_lens_q": torch.tensor([0, 5]), "max_length_q": 5, "seq_idx": torch.zeros(1, 5)}
    found = global_batch({"input_ids": torch.ones(1, 5), **derived}, by_sums, places=True).values
    assert found.keys() == {"input_ids", "cu_seq_lens_q", "seq_idx"}


@pytest.mark.parametrize(
    ("batch", "places", "message"),
    [
        (batch_of([0, 0, 1, 1]), True, "padding_side='right'"),
        (batch_of([1, 0, 1, 1]), True, "padding_side='right'"),
        (batch_of([1, 1, 1, 1], position_ids=torch.tensor([[0, 1, 0, 1]])), True, "leave the mask out"),
        (batch_of([1, 1, 1, 1], position_ids=torch.tensor([[0, 1, 0, 1]])), False, "leave the mask out"),
        (batch_of([1, 1, 1, 1], past_key_values=((),)), True, "outside of steps"),
        ({**batch_of([1, 1]), "attention_mask": torch.ones(1, 1, 2, 2)}, True, r"must be \(B, T\)"),
    ],
)
def test_masks_that_mean_something_else_are_refused(batch: dict[str, Any], places: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        global_batch(batch, SHARDING, places=places)


def test_a_mask_beside_document_ids_marks_no_padding() -> None:
    ids = torch.zeros(1, 3, dtype=torch.long)
    assert "attention_mask" not in global_batch(batch_of([1, 1, 1], doc_ids=ids), BY_IDS, places=True).values
    with pytest.raises(ValueError, match="let 'doc_ids'"):
        global_batch(batch_of([1, 1, 0], doc_ids=ids), BY_IDS, places=True)
