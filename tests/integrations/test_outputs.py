"""Outputs whose gradients are multiplied: whatever a training loop does with one, the factor stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cp_rewrite.batch.marks import is_part, mark_part
from cp_rewrite.integrations.parallelize import scaled

FACTOR = 4

LOOPS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda loss: loss,
    "mul_": lambda loss: loss.mul_(0.5),
    "div_": lambda loss: loss.div_(3),
    "add_": lambda loss: loss.add_(loss.detach()),
    "twice in place": lambda loss: loss.mul_(0.5).div_(3),
    "a view in place": lambda loss: loss.view(1).mul_(0.5).sum(),
    "by index": lambda loss: loss.index_fill_(0, torch.tensor(0), 2.0) if loss.ndim else loss.mul_(2),
    "cloned": lambda loss: loss.clone().mul_(0.5),
    "summed with itself": lambda loss: loss + loss.mul(2),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_factor_stays(loop: str) -> None:
    def gradient(factor: int) -> Tensor:
        weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        LOOPS[loop](scaled(weight.square().sum(), factor)).backward()
        assert weight.grad is not None
        return weight.grad

    assert torch.equal(gradient(FACTOR), gradient(1) * FACTOR)


def test_outputs_made_of_each_other_are_multiplied_once() -> None:
    weight = torch.ones(3, requires_grad=True)
    inner = weight * 2
    outer = inner.sum()
    first, second = scaled(inner, FACTOR), scaled(outer, FACTOR)
    (first.sum() + second).backward()
    assert torch.equal(weight.grad, torch.full((3,), 2.0 * (FACTOR + FACTOR)))  # type: ignore[arg-type]


def test_large_outputs_are_not_copied_and_not_changed() -> None:
    weight = torch.ones(1 << 17, requires_grad=True)
    logits = weight * 2
    out = scaled(logits, FACTOR)
    assert out.data_ptr() == logits.data_ptr()
    with pytest.raises(RuntimeError, match="modified inplace"):
        out.mul_(0.5)


def test_what_is_known_of_an_output_is_kept() -> None:
    loss = torch.ones(3, requires_grad=True).sum()
    mark_part(loss)
    assert is_part(scaled(loss, FACTOR))
