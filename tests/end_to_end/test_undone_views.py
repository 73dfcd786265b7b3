"""Views that come back to the shape of their tensor are the tensor, where nothing can tell them apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.one_process import check_or_refuse
from tests.helpers.packed_model import WIDTH, PackedModel


class Viewing(PackedModel):
    def __init__(self, change: Callable[[Viewing, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def extra(self) -> None:
        self.more = nn.Parameter(torch.randn(WIDTH))

    def mix(self, h: Tensor) -> Tensor:
        return self.change(self, h)


def choices(m: Viewing, h: Tensor) -> Tensor:
    return h.unflatten(0, (-1, 3)).sin().view(h.shape) + h.unflatten(0, (-1, 3)).view(-1, *h.shape[1:])


def written(m: Viewing, h: Tensor) -> Tensor:
    h = h * 1
    y = h.unflatten(-1, (4, 6))
    z = y.flatten(-2)
    y[..., 0, :] = 0
    return h + z.mul_(2)


def without_gradient(m: Viewing, h: Tensor) -> Tensor:
    with torch.no_grad():
        y = h.flatten(0, 1).view(h.shape)
    return h + y * m.more


def in_another_order(m: Viewing, h: Tensor) -> Tensor:
    return h + h.mT.reshape(h.shape)


@pytest.mark.parametrize("rows", [3, 6])
@pytest.mark.parametrize("change", [written, without_gradient])
def test_they_are_the_tensor(change: Callable[[Viewing, Tensor], Tensor], rows: int) -> None:
    assert check_or_refuse(Viewing(change), rows) is None


def test_views_that_are_read_on_their_way_stay() -> None:
    assert "cuts the batch dim" in str(check_or_refuse(Viewing(choices), 6))


def test_entries_in_another_order_are_refused() -> None:
    assert "TOKEN_MIXING" in str(check_or_refuse(Viewing(in_another_order), 3))
