"""Document ids that a model numbers anew, and writes by a mask into a view: right, as on one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.helpers.one_process import check_or_refuse
from tests.helpers.packed_model import PackedModel


class Scaled(PackedModel):
    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> Tensor | None:
        return super().mask(h, doc_ids * 2 + 1, position_ids, input_ids)


class FromZero(PackedModel):
    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> Tensor | None:
        return super().mask(h, doc_ids - doc_ids.min(), position_ids, input_ids)


class FlatLabels(PackedModel):
    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Tensor:
        kept = labels.clone()
        flat = kept.view(-1)
        flat[flat == 3] = -100
        return super().loss(logits, kept, num_items)


class FlatRows(PackedModel):
    def mix(self, h: Tensor) -> Tensor:
        changed = h * 1.0
        flat = changed.flatten(0, 1)
        flat[flat[:, 0] > 0] = 0
        return changed


class Turned(PackedModel):
    def mix(self, h: Tensor) -> Tensor:
        changed = h.clone()
        turned = changed.transpose(1, 2)
        turned.masked_fill_(turned > 1, 0.5)
        return changed


@pytest.mark.parametrize("model", [Scaled, FromZero, FlatLabels, FlatRows, Turned])
def test_they_are_right(model: type[PackedModel]) -> None:
    assert check_or_refuse(model()) is None


class Ones(PackedModel):
    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> Tensor | None:
        mask = super().mask(h, doc_ids, position_ids, input_ids)
        assert mask is not None
        shown = mask.to(h.dtype)
        return shown.masked_fill(shown == 0, -torch.inf)


def test_a_mask_that_adds_one_says_so() -> None:
    refused = check_or_refuse(Ones())
    assert refused is not None
    assert "MASK_NOT_PACKED: the mask adds 1 to the logits of keys of the query's document" in refused
