"""A checkpointed block that reads what the model changes behind it is refused: one process computes it by that again.
Of what is passed to the block torch itself says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.one_process import check_or_refuse


class Router(nn.Module):
    """`how`: when the bias that a checkpointed block reads is changed, and by what."""

    bias: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.embed, self.gate = how, nn.Embedding(19, 8), nn.Linear(8, 4)
        self.register_buffer("bias", torch.zeros(4))

    def block(self, h: Tensor, bias: Tensor) -> Tensor:
        def run(h: Tensor) -> Tensor:
            g = self.gate(h).sigmoid()
            if self.how == "inside":
                self.bias.add_(0.2)
            return (g + bias > 0.5).to(h.dtype) * g * g * (1 + bias)

        out: Any = checkpoint(run, h, use_reentrant=False)
        return out

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        h = self.embed(input_ids)
        if self.how == "before":
            self.bias.add_(0.1)
        bias = self.bias.clone() if self.how == "copy" else self.bias[:] if self.how == "view" else self.bias
        out = self.block(h, bias)
        if self.how == "block between":
            out = out + self.block(h, bias.clone())
        if self.how in ("behind", "view", "copy", "block between"):
            self.bias.add_(0.2)
        if self.how == "weight":
            with torch.no_grad():
                self.gate.bias.mul_(0.5)
        return out.sum()


@pytest.mark.parametrize("how", ["behind", "view", "weight", "block between"])
def test_what_is_changed_behind_the_block_is_refused(how: str) -> None:
    assert "behind it, and is computed again" in (check_or_refuse(Router(how)) or "")


def test_what_the_block_changes_itself_is_refused() -> None:
    assert "in a checkpointed block, which changes it, too" in (check_or_refuse(Router("inside")) or "")


@pytest.mark.parametrize("how", ["never", "before", "copy"])
def test_what_the_block_reads_again_as_it_was_is_right(how: str) -> None:
    assert check_or_refuse(Router(how)) is None
