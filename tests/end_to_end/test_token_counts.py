"""Numbers made from a row's token count as values: those of the whole row, on one process and on ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from cp_rewrite.passes.graph.nodes import bind_op
from cp_rewrite.passes.locality.rules.wholes import WithCount
from cp_rewrite.passes.values.edits import Ranks
from cp_rewrite.planning.plan_input import ROW_TOKENS
from tests.helpers.one_process import check_or_refuse
from tests.helpers.packed_model import PackedModel

Factor = Callable[[Tensor, Tensor, int], Tensor]
"""(hidden states (B, T, C), places (T,), T) -> what they are multiplied with."""


class Counting(PackedModel):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def mix(self, h: Tensor) -> Tensor:
        for name in self.names:
            found = (RIGHT | REFUSED)[name](h, torch.arange(h.shape[1], device=h.device), h.shape[1])
            h = h * (1 + 0.1 * (found[:, None] if found.ndim == 1 else found))
        return h


RIGHT: dict[str, Factor] = {
    "from_one": lambda h, i, t: torch.arange(1, t + 1, device=h.device).log1p(),
    "from_three_in_fp32": lambda h, i, t: torch.arange(3, t + 3, dtype=torch.float32, device=h.device).log1p(),
    "backwards": lambda h, i, t: torch.arange(t - 1, -1, -1, device=h.device).log1p(),
    "from_the_end_on": lambda h, i, t: torch.arange(t, 2 * t, device=h.device) / t,
    "one_more": lambda h, i, t: (i + 1).log(),
    "last": lambda h, i, t: (i == t - 1) * 1.0,
    "not_last": lambda h, i, t: (i != t - 1) * 1.0,
    "before_the_last_two": lambda h, i, t: (i < t - 2) * 1.0,
    "behind": lambda h, i, t: (t - 3 > i) * 1.0,
    "first_half": lambda h, i, t: (i < t // 2) * 1.0,
    "last_third": lambda h, i, t: (i >= t - t // 3) * 1.0,
    "to_the_end": lambda h, i, t: (t - 1 - i).log1p(),
    "share": lambda h, i, t: i / (t - 1),
    "reciprocal": lambda h, i, t: i * (1 / t),
    "root": lambda h, i, t: i * math.sqrt(t) * 0.1,
    "rounded_down": lambda h, i, t: torch.div(5 * i, t, rounding_mode="floor"),
    "remainder": lambda h, i, t: i * 3 % t,
    "clamped": lambda h, i, t: (i + 3).clamp(max=t - 1),
    "clamped_twice": lambda h, i, t: (i + 3).clamp(4, t - 1),
    "sum_rounded": lambda h, i, t: torch.div((h > 0).sum(), t, rounding_mode="floor"),
    "sum_less": lambda h, i, t: (h > 0).sum() - t,
    "sum_clamped": lambda h, i, t: (h > 0).sum().int().clamp(max=t),
    "sum_times": lambda h, i, t: h.sum() * (3 / (2 * t - 1)),
    "larger": lambda h, i, t: i / torch.sym_max(t, 14),
    "smaller_in_python": lambda h, i, t: i / min(t, 14),
    "without_the_last": lambda h, i, t: h.masked_fill((i == t - 1)[:, None], 0),
    "cosine": lambda h, i, t: i * math.cos(t),
    "one_of_two": lambda h, i, t: torch.where(torch.tensor(t > 10), i, i.cos()),
    "filled": lambda h, i, t: i * torch.full((1,), t > 10),
    "remainder_compared": lambda h, i, t: i * h.new_tensor(t % 64 == 13),
    "both": lambda h, i, t: i * torch.tensor((t > 10) & (t < 20)),
    "like_a_token": lambda h, i, t: i[:, None] * torch.full_like(h[:, 0], 1 / t)[:, None],
    "logarithm": lambda h, i, t: i * (0.1 * math.log(t / 8) + math.log(t, 10)),
    "of_math": lambda h, i, t: (
        i * math.exp(-t / 9) + math.log1p(t) / math.log10(t) - math.pow(t, 0.3) * math.exp2(-t / 20)
    ),
    "more_of_math": lambda h, i, t: i * (math.expm1(t / 20) + math.erf(t / 20) + math.asinh(t)) - math.lgamma(t / 4),
    "rounded_up": lambda h, i, t: i * math.ceil(t / 7) - int(math.sqrt(t)),
    "power": lambda h, i, t: (h.abs() + 1) ** (t / 20) + 3.0 ** (t / 20 * (i + 1).log())[:, None],
    "between": lambda h, i, t: torch.lerp(h, h * 2, t / 64) + torch.addcmul(h, h, h, value=t),
    "scaled": lambda h, i, t: torch.add(h, h, alpha=t),
    "written": lambda h, i, t: i * torch.zeros(1).fill_(t) + torch.tensor([t, 2 * t, 3]).sum(),
    "where_masked": lambda h, i, t: torch.where(h > 0, h, t / 9).masked_fill(i[:, None] == 3, t),
    "entry_of_a_table": lambda h, i, t: i * torch.arange(20)[t % 5] - torch.arange(99)[-t],
}
REFUSED: dict[str, Factor] = {
    "one_too_many": lambda h, i, t: torch.arange(1, t + 2, device=h.device).log().sum(),
    "one_fewer": lambda h, i, t: F.pad(torch.arange(1, t, device=h.device), (1, 0)),
    "every_other": lambda h, i, t: torch.arange(0, 2 * t, 2, device=h.device).log1p(),
}


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "tokens"), [(1, 13), (2, 15)])
@pytest.mark.parametrize("name", [*RIGHT, *REFUSED])
def test_numbers_of_tokens_are_the_rows(name: str, rows: int, tokens: int) -> None:
    assert (check_or_refuse(Counting(name), rows, tokens) is None) == (name in RIGHT)


def test_some_are() -> None:
    assert check_or_refuse(Counting("from_one", "last", "sum_rounded", "one_of_two", "logarithm", "of_math")) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_as_precise_as_on_one_process(dtype: torch.dtype) -> None:
    """Tensors of 16 bits are tried too: they hold few numbers of tokens."""
    ranks = Ranks("", 1, {ROW_TOKENS: torch.tensor([1027])})
    t, x = sympy.Symbol("t", integer=True), torch.randn(5, dtype=dtype)
    for func, run, expected in (
        (torch.ops.aten.mul.Tensor, (("other", sympy.Float(1 / 3) * t),), x * (1027 / 3)),
        (torch.ops.aten.clamp.default, (("max", t - 1026),), x.clamp(max=1)),
    ):
        found = WithCount(t, run, dtype)(ranks, func, bind_op(func, (x,), {}))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


class Windowed(PackedModel):
    def __init__(self, window: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.window = window

    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> Tensor:
        index = torch.arange(h.shape[1], device=h.device)
        behind = index[:, None] - index
        return torch.as_tensor(super().mask(h, doc_ids, position_ids, input_ids)) & self.window(behind, h.shape[1])


@pytest.mark.parametrize(
    "window",
    [
        pytest.param(lambda behind, t: (behind < 3) | torch.tensor(t > 10), id="wide in long rows"),
        pytest.param(lambda behind, t: (behind < 3) | torch.tensor((t > 10) & (t < 20)), id="wide between"),
        pytest.param(lambda behind, t: behind < torch.tensor(t / 4), id="a share of the row"),
    ],
)
def test_windows_by_the_number_of_tokens_are_refused(window: Callable[[Tensor, int], Tensor]) -> None:
    assert "the mask depends on the number of tokens" in str(check_or_refuse(Windowed(window)))


def test_what_holds_for_any_number_of_tokens_is_no_window() -> None:
    assert check_or_refuse(Windowed(lambda behind, t: (behind < 3) | torch.tensor(t < 1))) is None


class Logarithm(PackedModel):
    """As YaRN scales by the length. by: makes a factor of hidden states (B, T, C)."""

    def __init__(self, by: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.by = by

    def mix(self, h: Tensor) -> Tensor:
        return h * self.by(h)


def test_counts_that_are_refused_are_told_how_to_count() -> None:
    assert "torch.ones(T).sum()" in str(check_or_refuse(Logarithm(lambda h: math.gamma(h.shape[1]))))


def test_what_they_are_told_is_right() -> None:
    assert check_or_refuse(Logarithm(lambda h: torch.ones(h.shape[1]).sum().log().to(h.dtype))) is None
