"""Writes at places of the row: one process's loss and gradients, or a refusal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.one_process import check_or_refuse
from tests.helpers.packed_model import VOCAB, WIDTH, PackedModel, packed_batch

Write = Callable[["Writing", Tensor, Tensor, Tensor], Tensor | None]
"""Into `x` (B, T, C), or `y` (B, T) whole numbers, by hidden states `h` (B, T, C); or what takes the place of `x`."""


class Writing(PackedModel):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def extra(self) -> None:
        self.lin = nn.Linear(WIDTH, WIDTH)

    def mix(self, h: Tensor) -> Tensor:
        for name in self.names:
            x, y = h * 1.0, (h[..., 0] > 0).long() * 3
            found = (RIGHT | REFUSED | BEYOND)[name](self, x, y, h)
            h = (x if found is None else found).tanh() * (1 + F.one_hot(y.clamp(min=0), 9) * 0.1).sum(-1, keepdim=True)
        return h


def number(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> None:
    x[:, 0] = 0
    y[:, -1] = -100


def last(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> None:
    x[:, -1] = h[:, 0].sin()


def several(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> None:
    x[:, :2] = h[:, -2:]
    x[:, 2:5] = m.lin.weight[:3]


def at_ends(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> None:
    x[:, -3:-1] = h[:, :2].flip(1)
    y[:, 1:-1] = 2


def added(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> None:
    x[:, :1] += h[:, -1:]
    x[:, 3] -= h.sum(1)


def multiplied(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> None:
    x[:, -2:] *= m.lin.bias


def shifted(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> None:
    x[:, 1:] += h[:, :-1]


def of_features(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> None:
    x[:, 0, 3] = m.lin.bias[0]
    x[:, 1, :4] = m.lin.bias[:4]
    x[..., 2, 5:] = h.mean()


def by_a_view(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> None:
    x.transpose(1, 2)[..., 0] = 0


def emptied(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> None:
    x[:, 0].zero_()


def of_views(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> None:
    ahead = x[:, 1:]
    ahead.mul_(3)
    ahead = x[:, :-2]
    ahead -= m.lin.bias
    x[:, 2:].add_(h[:, :-2])
    x[..., 3, :].copy_(h[:, 1])
    y[:, -3:-1].fill_(-100)


def of_itself(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> None:
    y[..., :-1] = y[..., 1:].clone()
    x[:, 0] = x[:, 0] * 2
    x[:, 2:] = x[:, 2:] + x[:, :-2]


def by_masks(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    """As labels are made: shifted, and ignored where the next token is of another kind."""
    moved = y[:, 1:].clone()
    moved[y[:, 1:] != y[:, :-1]] = -100
    rolled = y.roll(-1, 1)
    rolled.masked_fill_(y != rolled, 5)
    rolled[:, -1] = -100
    x[y > 0] = 0.5
    x[..., :-1, :][moved > 0] = m.lin.bias.sum()
    return x * F.pad(moved, (0, 1), value=7)[..., None] + rolled[..., None]


def shifted_right(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    """As transformers makes inputs of a decoder of labels."""
    moved = y.new_zeros(y.shape)
    moved[:, 1:] = y[:, :-1].clone()
    moved[:, 0] = 7
    return x * (moved[..., None] + 1)


def rows_of(m: Writing) -> Tensor:
    """(48, C): more than there are tokens."""
    return torch.cat([m.lin.weight, m.lin.weight.sin()])


def views_assigned(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> None:
    u, v = x[:, 1:], y[:, :-1]
    u[:] = u * 3
    v[...] = v + 1
    u = x[:, 2]
    u[:] = u * 2 + h[:, 0]
    u = x[:, :-1]
    u.tanh_()


def entries_of_views(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> None:
    u, v = x[:, 1:], y[:, -3:]
    v.clamp_(max=2)
    u[:, :, :4] = 0


RIGHT: dict[str, Write] = {
    "number": number,
    "last": last,
    "several": several,
    "at_ends": at_ends,
    "added": added,
    "multiplied": multiplied,
    "shifted": shifted,
    "of_features": of_features,
    "by_a_view": by_a_view,
    "emptied": emptied,
    "of_views": of_views,
    "views_assigned": views_assigned,
    "entries_of_views": entries_of_views,
    "of_itself": of_itself,
    "by_masks": by_masks,
    "shifted_right": shifted_right,
    "select_scatter": lambda m, x, y, h: torch.select_scatter(h, h[:, -1], 1, 0),
    "slice_scatter": lambda m, x, y, h: torch.slice_scatter(h, h[:, -2:].sin(), dim=1, start=0, end=2),
    "shifted_by_slice_scatter": lambda m, x, y, h: torch.slice_scatter(h, h[:, :-1].sin(), 1, 1),
    "masked_scatter": lambda m, x, y, h: h.masked_scatter((y > 0)[..., None], rows_of(m)),
    "expanded_mask": lambda m, x, y, h: torch.masked_scatter(h, (y > 0)[..., None].expand_as(h), rows_of(m).flatten()),
}


def read_between(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    first = x[:, :1]
    x[:, 0] = 0
    return x + first


def masked_between(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    moved = y[:, 1:].clone()
    first = moved[:, :1]
    moved[moved > 0] = 9
    return x * (F.pad(moved, (1, 0)) + first)[..., None]


def every_other(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> None:
    x[:, ::2] = 0


def one_row(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> None:
    x[0, 1] = h[0, 2]


def view_read_later(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    ahead = x[:, 1:]
    ahead.mul_(3)
    return x + F.pad(ahead, (0, 0, 1, 0))


def viewed_twice(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> None:
    ahead = x[:, 1:]
    ahead[:, 1:] = 3


REFUSED: dict[str, Write] = {
    "masked_entries": lambda m, x, y, h: h.masked_scatter(h > 0, rows_of(m)),
    "masked_tokens": lambda m, x, y, h: h.masked_scatter((y > 0)[..., None], h.flip(1)),
    "one_mask_of_features": lambda m, x, y, h: h.masked_scatter(m.lin.bias > 9, rows_of(m)),
    "no_place": lambda m, x, y, h: torch.slice_scatter(h, h[:, :0], 1, 3, 3),
    "read_between": read_between,
    "masked_between": masked_between,
    "every_other": every_other,
    "one_row": one_row,
    "view_read_later": view_read_later,
    "viewed_twice": viewed_twice,
}


def beyond(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    """Python lets a slice reach beyond what there is."""
    x[:, :4096] = m.lin(h[:, :4096])
    x[:, -50:] = x[:, -50:] * 2
    x[:, 3:99] += h[:, 3:99]
    y[:, 2:77] = 1
    return torch.slice_scatter(x, h[:, :50].sin(), 1, 0, 50)


def beyond_a_share(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> None:
    x[:, :12] = m.lin(h[:, :12])


def at_a_place_beyond(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> None:
    x[:, 12] = m.lin.bias


def by_choices(m: Writing, x: Tensor, y: Tensor, h: Tensor) -> Tensor:
    places = torch.arange(h.shape[1])[:, None]
    return torch.where(places < 12, m.lin(h), torch.where(places == 12, m.lin.bias, x))


BEYOND: dict[str, Write] = {
    "beyond": beyond,
    "by_choices": by_choices,
    "beyond_a_share": beyond_a_share,
    "at_a_place_beyond": at_a_place_beyond,
}
"""Writes into rows of 16 tokens, of which a rank has 8."""


def test_writes_that_reach_beyond_a_share_and_the_row_are_right() -> None:
    assert check_or_refuse(Writing(*BEYOND), tokens=16) is None


class WrittenIds(PackedModel):
    def inputs(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        ids = input_ids.new_zeros(input_ids.shape)
        ids[:, 1:] = input_ids[:, :-1].clone()
        ids[:, 0] = 5
        return self.embed(ids)


@pytest.mark.slow
def test_ids_that_are_shifted_in_the_model_are_right() -> None:
    assert check_or_refuse(WrittenIds()) is None


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "tokens"), [(1, 13), (2, 15)])
@pytest.mark.parametrize("name", [*RIGHT, *REFUSED])
def test_writes_at_places_are_right(name: str, rows: int, tokens: int) -> None:
    refused = check_or_refuse(Writing(name), rows, tokens)
    assert refused is None or name in REFUSED, refused


class WithImages(PackedModel):
    """Token 3 stands for a patch of an image, whose encoder attends to patches."""

    def extra(self) -> None:
        count = int((packed_batch()["input_ids"] == 3).sum())
        self.patches = nn.Parameter(torch.randn(1, 1, count, WIDTH))

    def inputs(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        there = input_ids == 3
        image = F.scaled_dot_product_attention(self.patches, self.patches, self.patches)
        torch._check_tensor_all(there.sum() == self.patches.shape[2])  # holds of the row, of no shard
        torch._check_tensor_all(input_ids < VOCAB)
        return self.embed(input_ids).masked_scatter(there[..., None], image)


def test_patches_of_images_take_the_place_of_tokens() -> None:
    assert (packed_batch()["input_ids"] == 3).sum() > 1
    assert check_or_refuse(WithImages(), tokens=14) is None


def test_some_are() -> None:
    assert check_or_refuse(Writing("number", "added", "shifted_right", "by_masks")) is None
