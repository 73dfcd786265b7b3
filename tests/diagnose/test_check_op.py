"""`check_op`, and the look that a graph's first call takes at vouched ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cp_rewrite as cp
from tests.helpers.packed_model import TOKENS, PackedModel, packed_batch

X, WEIGHT = torch.randn(2, 16, 8), torch.randn(8, 8)


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad / grad.shape[1]


def test_an_op_of_each_token_is_so_along_its_token_dim() -> None:
    report = cp.check_op(F.linear, X, WEIGHT, tokens={0: 1})
    assert report
    assert str(report) == "linear treats tokens\n  alone   dim 1 of argument 0 -> dim 1 of result 0"
    assert cp.check_op(lambda x: x.transpose(1, 2), X, tokens={0: -2}).alone[0].results == (2,)
    assert cp.check_op(torch.cat, [X, X], -1, tokens={"0[0]": 1, "0[1]": 1})


def test_every_dim_is_tried_where_none_is_named() -> None:
    report = cp.check_op(torch.cumsum, X, 1)
    assert [(dict(way.tokens), way.results) for way in report.alone] == [({"0": 0}, (0,)), ({"0": 2}, (2,))]


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (lambda x: x - x.mean(1, keepdim=True), "differs from that of all"),
        (lambda x: x + torch.arange(x.shape[1])[:, None], "differs from that of all"),
        (lambda x: (x, x.abs().max()), "has no token dim"),
        (lambda x: F.dropout(x), "others each time"),
        (lambda x: x.mul_(2), "writes into"),
        (WrongBackward.apply, "gradient of tensor 0"),
    ],
)
def test_what_mixes_tokens_is_named(op: Callable[..., Any], why: str) -> None:
    before = X.clone()
    report = cp.check_op(op, X, tokens={0: 1})
    assert not report
    assert why in str(report)
    assert torch.equal(X, before)


@pytest.mark.parametrize(
    ("tokens", "error"), [({2: 1}, KeyError), ({}, KeyError), ({0: 3}, ValueError), ({0: 1, 1: 0}, ValueError)]
)
def test_dims_that_are_none_are_errors(tokens: dict[int | str, int], error: type[Exception]) -> None:
    with pytest.raises(error):
        cp.check_op(F.linear, X, WEIGHT, tokens=tokens)


@torch.library.custom_op("check_op::centred", mutates_args=())
def centred(x: Tensor) -> Tensor:
    """Less the mean over tokens."""
    return x - x.mean(1, keepdim=True)


@torch.library.custom_op("check_op::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


for each in (centred, doubled):
    each.register_fake(torch.empty_like)
    each.register_autograd(lambda ctx, grad: grad * 1)


class Vouched(PackedModel):
    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.op = op

    def mix(self, h: Tensor) -> Tensor:
        return h + self.op(h)


def first_call(op: Callable[[Tensor], Tensor], inner: Any, **how: Any) -> None:
    names = ("check_op::centred", "check_op::doubled")
    sharding = cp.Sharding(1, TOKENS, cp.DocumentIds("doc_ids"), inner=inner, local_ops=names, **how)
    torch._dynamo.reset()
    model = torch.compile(Vouched(op), backend=cp.backend(sharding), fullgraph=True)
    for _ in range(2):
        with sharding.shard(packed_batch()) as local:
            model(**local).backward()


def test_a_vouched_op_that_mixes_tokens_is_an_error_of_the_first_call() -> None:
    with pytest.raises(RuntimeError, match="check_op::centred, named in local_ops, does not treat tokens alone"):
        first_call(torch.ops.check_op.centred, "aot_eager")


def test_others_are_not_and_none_is_looked_at_without_checks() -> None:
    first_call(torch.ops.check_op.doubled, "eager")
    first_call(torch.ops.check_op.centred, "eager", check_batches=False)
