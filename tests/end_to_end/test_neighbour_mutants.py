"""Shifts and convolutions one step beside those that are read: each is as on one process, or refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.helpers.packed_model import TOKENS, WIDTH, PackedModel, packed_batch
from tests.helpers.pool import Pool

pytestmark = pytest.mark.slow

Mix = Callable[["Beside", Tensor], Tensor]


class Beside(PackedModel):
    """The packed model with one function of hidden states."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def extra(self) -> None:
        self.first = nn.Parameter(torch.randn(1, 2, WIDTH))
        self.weight = nn.Parameter(torch.randn(WIDTH, 1, 3))
        self.full = nn.Parameter(torch.randn(WIDTH, WIDTH, 2) / 4)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.state: Tensor
        self.register_buffer("state", torch.ones(1, 1, WIDTH))

    def mix(self, h: Tensor) -> Tensor:
        return h + MUTANTS[self.name](self, h)


def padded(before: int, after: int, start: int, value: float = 0.0) -> Mix:
    """T entries from `start` on of h with so many numbers before and behind it."""
    return lambda m, h: F.pad(h, (0, 0, before, after), value=value)[:, start : start + h.shape[1]]


def joined(before: int, kept: int) -> Mix:
    return lambda m, h: torch.cat([h.new_zeros(len(h), before, WIDTH), h[:, :kept]], 1)[:, : h.shape[1]]


def rolled(by: int) -> Mix:
    return lambda m, h: h.roll(by, 1)


def convolved(padding: int, dilation: int, stride: int, start: int, length: int | None) -> Mix:
    def mix(m: Beside, h: Tensor) -> Tensor:
        out = F.conv1d(h.mT, m.weight, m.bias, stride, padding, dilation, WIDTH)
        taken = out[..., start : start + h.shape[1]] if length is None else out[..., start:length]
        return taken.mT

    return mix


def written_before(m: Beside, h: Tensor) -> Tensor:
    x = h * 1
    shifted = F.pad(x[:, :-1], (0, 0, 1, 0))
    x.mul_(2)
    return shifted + x


def written_view(m: Beside, h: Tensor) -> Tensor:
    x = h * 1
    x[:, 1:] = h[:, :-1]
    return x


def written_result(m: Beside, h: Tensor) -> Tensor:
    x = F.pad(h, (0, 0, 1, -1))
    x.add_(h)
    return x


def written_twice(m: Beside, h: Tensor) -> Tensor:
    x = h * 1
    before = x[:, :-1]
    x.add_(1)
    return torch.cat([x[:, :1], before], 1)


def without_gradient(m: Beside, h: Tensor) -> Tensor:
    with torch.no_grad():
        before = h[:, :-1]
    return torch.cat([m.first[:, :1].expand(len(h), -1, -1), before], 1)


def all_without_gradient(m: Beside, h: Tensor) -> Tensor:
    with torch.no_grad():
        return F.pad(h, (0, 0, 1, -1))


OTHERS: dict[str, Mix] = {
    "step": lambda m, h: F.pad(h[:, ::2], (0, 0, 0, h.shape[1] - (h.shape[1] + 1) // 2)),
    "half": lambda m, h: torch.cat([h[:, h.shape[1] // 2 :], h[:, : h.shape[1] // 2]], 1),
    "roll_by_half": lambda m, h: h.roll(h.shape[1] // 2, 1),
    "roll_by_length": lambda m, h: h.roll(h.shape[1] - 1, 1),
    "roll_two_dims": lambda m, h: h.roll((1, 1), (1, 2)),
    "roll_flat": lambda m, h: h.roll(1),
    "roll_features": lambda m, h: h.roll(1, 2),
    "roll_all": lambda m, h: h.roll(14, 1),
    "roll_far": lambda m, h: h.roll(20, 1),
    "two_sources": lambda m, h: torch.cat([h.sin()[:, :1], h[:, :-1]], 1),
    "two_shifts_joined": lambda m, h: torch.cat([h[:, :3], h[:, :-3]], 1),
    "swapped_ends": lambda m, h: torch.cat([h[:, -1:], h[:, 1:-1], h[:, :1]], 1),
    "last_repeated": lambda m, h: torch.cat([h[:, 1:], h[:, -1:]], 1),
    "middle_left_out": lambda m, h: torch.cat([h[:, :4], h[:, 5:], h[:, :1]], 1),
    "state": lambda m, h: torch.cat([m.state.expand(len(h), -1, -1), h[:, :-1]], 1),
    "part_of_a_parameter": lambda m, h: torch.cat([m.first[:, 1:].expand(len(h), -1, -1), h[:, :-1]], 1),
    "parameter_twice": lambda m, h: torch.cat([m.first, m.first, h[:, :-4]], 1),
    "parameter_behind": lambda m, h: torch.cat([h[:, 2:], m.first], 1),
    "mean_before": lambda m, h: torch.cat([h.mean(1, keepdim=True), h[:, :-1]], 1),
    "not_quite_zero": lambda m, h: torch.cat([h[:, :1] * 0.5, h[:, :-1]], 1),
    "zero_of_something": lambda m, h: torch.cat([h[:, :1] * m.bias, h[:, :-1]], 1),
    "ones": lambda m, h: torch.cat([torch.ones_like(h[:, :1]), h[:, :-1]], 1),
    "full": lambda m, h: torch.cat([torch.full_like(h[:, :1], 0.3), h[:, :-1]], 1),
    "detached": lambda m, h: torch.cat([h[:, :1] * 0, h[:, :-1].detach()], 1),
    "detached_source": lambda m, h: F.pad(h.detach(), (0, 0, 1, -1)),
    "without_gradient": without_gradient,
    "all_without_gradient": all_without_gradient,
    "narrower_dtype": lambda m, h: F.pad(h.float(), (0, 0, 1, -1)).double(),
    "cast_between": lambda m, h: F.pad(h[:, :-1].float(), (0, 0, 1, 0)).double(),
    "bools": lambda m, h: F.pad(h > 0, (0, 0, 1, -1)).double(),
    "features_too": lambda m, h: F.pad(h, (1, -1, 1, -1)),
    "features_instead": lambda m, h: F.pad(h, (1, -1)),
    "part_of_features": lambda m, h: F.pad(h[:, :-1, :5], (0, WIDTH - 5, 1, 0)),
    "transposed_between": lambda m, h: F.pad(h[:, :-1].mT, (1, 0)).mT,
    "reflected": lambda m, h: F.pad(h.mT, (1, 0), mode="reflect")[..., :-1].mT,
    "replicated": lambda m, h: F.pad(h.mT, (1, 0), mode="replicate")[..., :-1].mT,
    "circular": lambda m, h: F.pad(h.mT, (1, 0), mode="circular")[..., :-1].mT,
    "difference": lambda m, h: h.diff(dim=1, prepend=h[:, :1]),
    "difference_of_slices": lambda m, h: F.pad(h[:, 1:] - h[:, :-1], (0, 0, 1, 0)),
    "flipped": lambda m, h: F.pad(h.flip(1), (0, 0, 1, -1)).flip(1),
    "unfolded": lambda m, h: F.pad(h, (0, 0, 2, 0)).unfold(1, 3, 1).sum(-1),
    "pooled": lambda m, h: F.avg_pool1d(F.pad(h.mT, (2, 0)), 3, 1).mT,
    "conv_of_shift": lambda m, h: F.conv1d(F.pad(h, (0, 0, 1, -1)).mT, m.weight, None, 1, 2, 1, WIDTH)[..., :-2].mT,
    "conv_of_roll": lambda m, h: F.conv1d(h.roll(1, 1).mT, m.weight, None, 1, 1, 1, WIDTH).mT,
    "conv_twice": lambda m, h: (
        F.conv1d(F.conv1d(h.mT, m.weight, None, 1, 2, 1, WIDTH)[..., :-2], m.weight, None, 1, 1, 1, WIDTH).mT
    ),
    "conv_of_conv": lambda m, h: (
        F.conv1d(F.conv1d(h.mT, m.weight, None, 1, 2, 1, WIDTH), m.weight, None, 1, 0, 1, WIDTH).mT
    ),
    "conv_rolled": lambda m, h: F.conv1d(h.mT, m.weight, None, 1, 1, 1, WIDTH).roll(1, 2).mT,
    "conv_activated_first": lambda m, h: F.conv1d(h.mT, m.weight, None, 1, 2, 1, WIDTH).sin()[..., :-2].mT,
    "conv_full": lambda m, h: F.conv1d(F.pad(h.mT, (1, 0)), m.full, m.bias).mT,
    "conv_by_tokens": lambda m, h: F.conv1d(h.mT, m.weight * h.mean(), None, 1, 1, 1, WIDTH).mT,
    "conv_transposed": lambda m, h: F.conv_transpose1d(h.mT, m.weight, None, 1, 1, 0, WIDTH).mT,
    "conv2d": lambda m, h: F.conv2d(h[:, None], torch.ones(1, 1, 3, 3, dtype=h.dtype), None, 1, 1)[:, 0],
    "conv_same": lambda m, h: F.conv1d(h.mT, m.weight, m.bias, 1, "same", 2, WIDTH).mT,
    "conv_valid": lambda m, h: F.pad(F.conv1d(h.mT, m.weight, m.bias, 1, "valid", 1, WIDTH), (2, 0)).mT,
    "written_before": written_before,
    "written_view": written_view,
    "written_result": written_result,
    "written_twice": written_twice,
}

MUTANTS: dict[str, Mix] = {
    **{
        f"pad_{before}_{after}_from_{start}": padded(before, after, start, value)
        for before, after, start, value in [
            (1, 0, 0, 0.0),
            (2, 0, 0, 0.0),
            (2, 0, 1, 0.5),
            (1, 1, 2, 0.0),
            (0, 1, 1, -1.0),
            (3, 2, 0, 0.0),
            (3, 2, 5, 0.0),
            (3, 2, 4, 0.0),
            (-1, 1, 0, 0.0),
            (-2, 3, 1, 0.0),
        ]
    },
    **{
        f"joined_{before}_{kept}": joined(before, kept)
        for before, kept in [(1, -1), (2, -1), (2, -2), (1, -2), (3, 99)]
    },
    **{f"roll_{by}": rolled(by) for by in (-5, -1, 0, 2, 13)},
    **{
        f"conv_{padding}_{dilation}_from_{start}": convolved(padding, dilation, 1, start, None)
        for padding, dilation, start in itertools.product((1, 2, 4), (1, 2), (0, 1, 2))
        if start + 2 * dilation <= 2 * padding
    },
    **{
        f"conv_{padding}_{dilation}_{stride}_{start}_{length}": convolved(padding, dilation, stride, start, length)
        for padding, dilation, stride, start, length in [
            (2, 1, 1, 0, -2),
            (2, 1, 1, 1, -1),
            (2, 1, 1, 2, None),
            (3, 1, 2, 0, -2),
            (1, 1, 1, 0, None),
            (2, 2, 1, 0, None),
        ]
    },
    **OTHERS,
    "last_of_fewer": lambda m, h: torch.cat([h[:, :2][:, -4:], h[:, :-2]], 1),
}


def step(model: Callable[..., Tensor], batch: dict[str, Tensor]) -> float:
    loss = model(**batch)
    loss.backward()
    return loss.item()


def sharded_step(mesh: DeviceMesh, name: str, batch: dict[str, Tensor]) -> Any:
    """The loss's part and gradients; where the model is refused, the refusal."""
    sharding = cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids"), "head_tail", "all_gather", inner="eager")
    torch._dynamo.reset()
    model = Beside(name).double()
    try:
        with sharding.shard(batch) as local:
            loss = step(torch.compile(model, backend=cp.backend(sharding), fullgraph=True), local)
    except cp.RewriteRefused as refused:
        return str(refused)
    except ValueError as error:
        return str(error)
    cp.sum_gradients(model.parameters(), sharding)
    return loss, {key: p.grad.numpy() for key, p in model.named_parameters() if p.grad is not None}


REFUSED: set[str] = set()


@pytest.mark.parametrize("tokens", [13, 14])
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_it_is_right_or_refused(pool: Pool, name: str, tokens: int) -> None:
    batch = packed_batch(1, tokens)
    model = Beside(name).double()
    try:
        loss = step(model, batch)
    except RuntimeError as error:
        pytest.skip(f"no such model for {tokens} tokens: {error}")
    results = pool.run(2, sharded_step, name, batch)
    if any(isinstance(result, str) for result in results):
        assert len(set(results)) == 1
        assert not name.startswith(("pad_", "joined_")), results[0]
        REFUSED.add(name)
        return
    assert sum(part for part, _ in results) == pytest.approx(loss, rel=1e-9)
    for _, grads in results:
        for key, p in model.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(torch.from_numpy(grads[key]), p.grad, rtol=1e-7, atol=1e-9, msg=key)


def test_there_are_enough_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(MUTANTS) >= 60
    with capsys.disabled():
        print(f"\n{len(MUTANTS)} mutants, refused: {', '.join(sorted(REFUSED))}")
