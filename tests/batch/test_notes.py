"""Models that hold sizes of the whole row, and what torch says of others, with a note on what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cp_rewrite as cp
from tests.border.model import TOKENS, WIDTH, Batch, Model, document_mask, keep_tokens, pack

TRIANGLE = torch.ones(23, 23).tril().bool()


def select(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h + h[:, 20][:, None]


def narrow(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h + h.narrow(1, 10, 8).sum(1, keepdim=True)


def picked(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h + h.select(1, 20)[:, None]


def split(model: Model, h: Tensor, b: Batch) -> Tensor:
    return torch.cat(h.split([15, h.shape[1] - 15], 1)[::-1], 1)


def viewed(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h.view(1, 23, WIDTH)


def parted(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h.unflatten(1, (23, 1)).flatten(1, 2)


def widened(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h.view(1, 23, -1)


def write(model: Model, h: Tensor, b: Batch) -> Tensor:
    h = h.clone()
    h[:, :14] = torch.ones(14, WIDTH)
    return h


def largest(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h + h.topk(15, 1).values.sum(1, keepdim=True)


def smallest(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h + h.mode(1).values[:, None]


def unbound(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h + h.unbind(1)[20][:, None]


def convolved(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h + torch.nn.functional.conv1d(h.mT, torch.ones(WIDTH, WIDTH, 15)).sum(-1)[:, None]


def multiplied(model: Model, h: Tensor, b: Batch) -> Tensor:
    return torch.ones(1, 23, 23).bmm(h)


def of_closure(b: Batch) -> Tensor:
    return TRIANGLE[None, None]


def with_closure(b: Batch) -> Tensor:
    return document_mask(b) & TRIANGLE


def repeated(b: Batch) -> Tensor:
    ids = b["doc_ids"][0]
    ids = torch.repeat_interleave(torch.arange(3), torch.bincount(ids, minlength=3))
    index = torch.arange(b["doc_ids"].shape[1])
    return ((ids[:, None] == ids) & (index[:, None] >= index))[None, None]


@pytest.mark.parametrize("mix", [select, narrow, picked, write, largest, convolved])
def test_places_beyond_a_ranks_share_are_the_rows(mix: Callable[[Model, Tensor, Batch], Tensor]) -> None:
    torch._dynamo.reset()
    sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"))
    assert cp.check(Model(mix=mix), sharding, pack((9, 8, 6))).largest < 1e-5


@pytest.mark.parametrize(
    ("mix", "mask", "says"),
    [
        (split, document_mask, "split_with_sizes splits the token dim"),
        (viewed, document_mask, "fixes the number of tokens at 23"),
        (parted, document_mask, "fixes the number of tokens at 23"),
        (widened, document_mask, "fixes the number of tokens at 23"),
        (smallest, document_mask, "mode reduces over tokens"),
        (unbound, document_mask, "fixes the number of tokens at 23"),
        (multiplied, document_mask, "fixes the number of tokens at 23"),
        (keep_tokens, of_closure, "its values are not in the graph"),
        (keep_tokens, with_closure, "its values are not in the graph"),
        (keep_tokens, repeated, "a mask compares ids themselves"),
    ],
)
def test_sizes_of_the_whole_row_are_refused_with_the_line(
    mix: Callable[[Model, Tensor, Batch], Tensor], mask: Callable[[Batch], Tensor], says: str
) -> None:
    model, batch = Model(mix=mix, mask=mask), pack((9, 8, 6))
    torch._dynamo.reset()
    report, notes = None, [""]
    try:
        report = cp.explain(model, cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids")))(**batch)
    except torch._dynamo.exc.UserError as error:
        notes = error.__notes__
    assert says in f"{report}{notes}"
    assert mask is repeated or "test_notes.py" in str(report)


@pytest.mark.parametrize(
    "mix", [lambda model, h, b: h + h[:, 23][:, None], lambda model, h, b: h @ torch.ones(17, WIDTH)]
)
def test_mistakes_of_the_model_are_no_refusals(mix: Callable[[Model, Tensor, Batch], Tensor]) -> None:
    model, batch = Model(mix=mix), pack((9, 8, 6))
    torch._dynamo.reset()
    with pytest.raises((IndexError, torch._dynamo.exc.TorchRuntimeError)):
        cp.explain(model, cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids")))(**batch)


SEEN: list[float] = []


@pytest.mark.parametrize(
    "hook",
    [
        lambda module: module.register_full_backward_hook(lambda *_: None),
        lambda module: module.register_full_backward_pre_hook(lambda *_: None),
        lambda module: module.register_backward_hook(lambda *_: None),
        lambda module: module.register_forward_hook(lambda m, x, out: (out.register_hook(lambda g: g * 2), None)[1]),
        lambda module: module.register_forward_hook(
            lambda m, x, out: (out.register_hook(lambda g: SEEN.append(g.sum().item())), None)[1]
        ),
    ],
)
def test_hooks_of_the_backward_are_explained(hook: Callable[[nn.Module], Any]) -> None:
    model, batch = Model(), pack((9, 8, 6))
    hook(model.qkv)
    torch._dynamo.reset()
    report, said = None, ""
    try:
        report = cp.explain(model, cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids")))(**batch)
    except torch._dynamo.exc.Unsupported as error:
        said = " ".join(error.__notes__)
    assert "change a gradient by a torch.autograd.Function" in f"{report}{said}"


class Doubled(torch.autograd.Function):
    """The identity, whose gradient is doubled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


def at_places(model: Model, h: Tensor, b: Batch) -> Tensor:
    return h + h[:, torch.tensor([20, 3])].sum(1, keepdim=True)


def test_what_the_notes_advise_is_right() -> None:
    model, batch = Model(mix=at_places), pack((9, 8, 6))
    model.qkv.register_forward_hook(lambda module, x, out: Doubled.apply(out))
    torch._dynamo.reset()
    assert cp.check(model, cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids")), batch).largest < 1e-5
