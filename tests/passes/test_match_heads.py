"""Key and value heads that the model repeats for its query heads are taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.matching import PACKED, Model, heads, the_site


def grouped(expand: Callable[[Tensor], Tensor], **options: Any) -> Model:
    def model(**b: Tensor) -> Tensor:
        k, v = heads(b, 2) + 1.0, heads(b, 2) - 1.0
        return F.scaled_dot_product_attention(heads(b, 6), expand(k), expand(v), attn_mask=PACKED(**b), **options)

    return model


def expand_reshape(x: Tensor) -> Tensor:
    b, h, t, d = x.shape
    return x[:, :, None].expand(b, h, 3, t, d).reshape(b, h * 3, t, d)


@pytest.mark.parametrize(
    "expand", [expand_reshape, lambda x: x.repeat_interleave(3, dim=1), lambda x: torch.repeat_interleave(x, 3, 1)]
)
def test_expanded_heads_are_taken_back(expand: Callable[[Tensor], Tensor]) -> None:
    site = the_site(grouped(expand))
    assert (site.key.name, site.value.name) == ("k", "v")
    assert site.key.meta["example_value"].shape[1] == 2


def test_multi_query_head_is_taken_back() -> None:
    def model(**b: Tensor) -> Tensor:
        k = heads(b, 1) + 1.0
        return F.scaled_dot_product_attention(heads(b, 6), *[k.expand(-1, 6, -1, -1)] * 2, attn_mask=PACKED(**b))

    assert the_site(model).key.meta["example_value"].shape[1] == 1


def test_enable_gqa() -> None:
    site = the_site(grouped(lambda x: x, enable_gqa=True))
    assert site.key.meta["example_value"].shape[1] == 2


@pytest.mark.parametrize(
    "expand",
    [
        lambda x: x.repeat(1, 3, 1, 1),
        lambda x: torch.cat([x, x, x], 1),
        lambda x: expand_reshape(x.flip(2)).flip(2),
        lambda x: x[:, None].expand(-1, 3, -1, -1, -1).reshape(x.shape[0], 6, x.shape[2], 4),
    ],
)
def test_other_orders_of_heads_stay(expand: Callable[[Tensor], Tensor]) -> None:
    site = the_site(grouped(expand))
    shape = site.key.meta["example_value"].shape
    assert site.key.meta["example_value"].shape[1] == 6 or site.key.name.startswith("flip"), shape
