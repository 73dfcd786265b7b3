"""Masks of features, which all ranks know, beside masks of tokens, which are another number of them on each rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.one_process import check_or_refuse
from tests.helpers.packed_model import WIDTH, PackedModel


class Masking(PackedModel):
    def __init__(self, change: Callable[[Masking, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def extra(self) -> None:
        self.thirds: Tensor
        self.register_buffer("thirds", torch.arange(WIDTH) % 3 == 0)

    def mix(self, h: Tensor) -> Tensor:
        return self.change(self, h)


def halves(m: Masking, h: Tensor) -> Tensor:
    even = torch.arange(WIDTH) % 2 == 0
    h = torch.cat([h[..., even].sin(), h[..., ~even]], -1)
    return h + F.pad(h[:, :, m.thirds], (0, WIDTH - WIDTH // 3))


def tokens(m: Masking, h: Tensor) -> Tensor:
    return h + h[:, torch.arange(h.shape[1]) % 2 == 0].amax(1, keepdim=True)


def tokens_of_values(m: Masking, h: Tensor) -> Tensor:
    return h + h[h[..., 0] > 0].cumsum(0).amax(0)


def test_features_are_picked_by_a_mask() -> None:
    assert check_or_refuse(Masking(halves)) is None


@pytest.mark.parametrize("change", [tokens, tokens_of_values])
def test_tokens_are_not(change: Callable[[Masking, Tensor], Tensor]) -> None:
    assert "picks tokens by a mask" in str(check_or_refuse(Masking(change)))
