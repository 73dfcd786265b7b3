"""Inputs of keys and values travel in their place: loss and all gradients are those of one process."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.end_to_end.test_end_to_end import LAYOUTS, LIMIT, TOKENS, make_batch
from tests.helpers import latent, models
from tests.helpers.one_process import gradients_of, step_of_ranks
from tests.helpers.pool import Pool
from tests.helpers.tolerances import relative_error

Result = tuple[float, dict[str, Tensor]]


def build(name: str) -> nn.Module:
    return models.build_model(name) if name in models.MODELS else latent.build(name)


@functools.cache
def compiled(name: str, sharding: cp.Sharding) -> tuple[nn.Module, Callable[..., Any]]:
    model = build(name)
    return model, torch.compile(model, backend=cp.backend(sharding), fullgraph=True)


def sharded_step(mesh: DeviceMesh, name: str, batch: dict[str, Tensor], layout: Any, options: dict[str, Any]) -> Result:
    plain = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), inner="aot_eager")
    sharding = dataclasses.replace(plain, **options)
    model, run = compiled(name, sharding)
    sharding = dataclasses.replace(sharding, layout=layout)
    model.zero_grad()
    with sharding.shard(batch, shift_labels=True) as local:
        loss = run(**local).loss
    return step_of_ranks(model, loss, sharding)


def plain_step(name: str, batch: dict[str, Tensor]) -> Result:
    model = copy.deepcopy(build(name))
    loss = model(**batch).loss
    loss.backward()
    return float(loss.detach()), gradients_of(model)


def check(pool: Pool, ranks: int, name: str, layout: str, limit: float = LIMIT, **options: Any) -> None:
    batch = make_batch([[13, 1, 7, 0, 29, 31]])
    loss, grads = plain_step(name, batch)
    options = {"exchange_at": "narrowest", "exchange": "needed", **options}
    for total, sharded in pool.run(ranks, sharded_step, name, batch, layout, options):
        assert abs(total - loss) <= limit * abs(loss)
        assert sharded.keys() == grads.keys()
        for key, grad in grads.items():
            assert relative_error(sharded[key], grad) <= limit, key


CASES = [
    *((name, "needed", "balanced", 2) for name in (*latent.LAYERS, "checkpointed")),
    *(("latent", *case) for case in itertools.product(("needed", "all_gather"), LAYOUTS, (2, 3))),
    *(("deepseek_v3", exchange, "balanced", ranks) for exchange, ranks in (("needed", 3), ("all_gather", 2))),
]


def slow_but(quick: int) -> list[Any]:
    return [pytest.param(*case, marks=[pytest.mark.slow] if i >= quick else []) for i, case in enumerate(CASES)]


@pytest.mark.parametrize(("name", "exchange", "layout", "ranks"), slow_but(1))
def test_latents_travel(pool: Pool, name: str, exchange: str, layout: str, ranks: int) -> None:
    inner = "aot_eager" if name == "latent" and ranks == 3 else "eager"
    check(pool, ranks, name, layout, exchange=exchange, inner=inner)


@pytest.mark.slow
def test_autocast_errs_no_more_than_where_keys_travel(pool: Pool) -> None:
    batch = make_batch([[13, 1, 7, 0, 29, 31]])
    _, grads = plain_step("autocast", batch)
    errors: list[float] = []
    for at in ("narrowest", "attention"):
        _, sharded = pool.run(2, sharded_step, "autocast", batch, "balanced", {"exchange_at": at})[0]
        errors.append(max(relative_error(sharded[key], grad) for key, grad in grads.items()))
    assert errors[0] <= 1.5 * errors[1]
