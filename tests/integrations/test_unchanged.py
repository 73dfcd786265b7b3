"""Changes that a parallelized model can't have any more: each raises before it would train on something else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.end_to_end.test_end_to_end import TOKENS, make_batch
from tests.helpers.models import build_model
from tests.helpers.pool import Pool


def doubled(module: nn.Module, args: Any, out: Any) -> Any:
    return out._replace(loss=out.loss * 2)


def what_is_said(mesh: DeviceMesh) -> tuple[list[float], list[str]]:
    """(losses of a model that was parallelized as it should be, errors of what comes too late)."""
    torch._dynamo.reset()
    sharding, batch = cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), inner="eager"), make_batch([[13, 8]])
    losses: list[float] = []
    errors: list[str] = []

    def loss_of(model: Any) -> None:
        with sharding.shard(batch, shift_labels=True) as local:
            losses.append(float(model(**local).loss.detach()))

    def fails(late: Callable[[Any], Any], **kind: Any) -> None:
        model = cp.parallelize(build_model("tiny"), mesh, sharding, **kind)
        try:
            late(model)
        except RuntimeError as error:
            errors.append(str(error))

    weights = {name: value.clone() for name, value in build_model("tiny").state_dict().items()}
    plain = build_model("tiny")
    plain.register_forward_hook(doubled)
    model = cp.parallelize(plain, mesh, sharding)
    loss_of(model)  # the hook ran once
    with pytest.raises(RuntimeError, match="whole weights"):
        model.load_state_dict(weights)
    model.reshard()  # type: ignore[operator]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    set_model_state_dict(model, dict(weights), options=StateDictOptions(full_state_dict=True))
    loss_of(model)

    def hook_inside(model: nn.Module) -> None:
        next(iter(model.children())).register_forward_hook(lambda *_: None)
        loss_of(model)

    def other_module(model: Any) -> None:
        model.get_submodule("module" if hasattr(model, "module") else "").adapter = nn.Linear(2, 2)
        loss_of(model)

    ddp = {"data_parallel": "ddp"}
    fails(hook_inside)
    fails(other_module)
    fails(other_module, **ddp)
    fails(copy.deepcopy)
    fails(copy.deepcopy, **ddp)
    fails(lambda model: model.load_state_dict(weights))
    fails(lambda model: model.load_state_dict(weights, assign=True))
    fails(lambda model: loss_of(torch.compile(model, backend="eager")))
    fails(lambda model: loss_of(torch.compile(model, backend="eager")), **ddp)
    return losses, errors


def test_what_comes_too_late_is_named(pair: Pool) -> None:
    expected = 2 * float(build_model("tiny")(**make_batch([[13, 8]])).loss.detach())
    words = ("got a hook after", *("put in or taken out",) * 2, *("can't be copied",) * 2, *("whole weights",) * 2)
    for losses, errors in pair.run(2, what_is_said):
        assert all(abs(loss / expected - 1) < 1e-5 for loss in losses)
        for error, said in zip(errors, (*words, *("call it as it is",) * 2), strict=True):
            assert said in error


def test_a_group_that_is_gone_is_named() -> None:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    sharding = cp.Sharding(DeviceMesh("cpu", [0], mesh_dim_names=("cp",)), {"x": 1}, cp.WholeRows())
    assert sharding.rank == 0
    torch.distributed.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"is gone: destroy_process_group\(\) comes last"):
        _ = sharding.rank
