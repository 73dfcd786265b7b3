"""`cp.parallelize` on gloo against one process: FSDP2 by blocks and whole, DDP, alone and in data-parallel groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import cp_rewrite as cp
from tests.end_to_end.test_end_to_end import TOKENS, make_batch
from tests.helpers.models import build_model
from tests.helpers.one_process import assert_gradients
from tests.helpers.pool import Pool

LIMIT = 1e-5
KINDS: dict[str, dict[str, Any]] = {"by blocks": {}, "whole": {"blocks": ()}, "ddp": {"data_parallel": "ddp"}}
STEPS = [[[[13, 1, 7, 11]], [[5, 3, 9, 2, 6, 7]]], [[[40, 1]], [[8, 8, 8, 7]]]]
"""Documents of the micro-batches of each step: unequally many targets, tokens that two ranks do not divide."""
CLASSES = {("llama", "by blocks"): (4, 3), ("gemma3", "by blocks"): (6, 4), ("mixtral", "by blocks"): (4, 3)}
"""Segments of a graph, and how many are compiled: of equal layers one. Layers of gemma3 have two windows and two
RoPEs in turns."""
Recorded = list[tuple[list[float], float, dict[str, Tensor]]]
"""Per step: the loss of each micro-batch, the norm of the gradients, and the gradients."""


def whole(values: dict[str, Any]) -> dict[str, Tensor]:
    """Copies of what DDP named and FSDP sharded."""
    return {
        name.removeprefix("module."): (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()
        for name, x in values.items()
    }


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return whole({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def targets(batches: list[dict[str, Tensor]], dim: int = 1) -> Tensor:
    return torch.stack([(batch["labels"][:, dim:] != -100).sum() for batch in batches]).sum()


def train(model: nn.Module, loss_of: Callable[[dict[str, Tensor], Tensor], Tensor], steps: Any = STEPS) -> Recorded:
    """Steps of accumulated gradients, clipped."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)  # AdamW would blow up what rounds to almost nothing
    recorded: Recorded = []
    for micro_batches in steps:
        batches = [make_batch(rows) for rows in micro_batches]
        losses: list[float] = []
        for batch in batches:
            loss = loss_of(batch, targets(batches))
            loss.backward()
            losses.append(loss.item())
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        recorded.append((losses, float(norm.full_tensor() if isinstance(norm, DTensor) else norm), gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    recorded.append(([], 0.0, whole(dict(model.named_parameters()))))
    return recorded


def train_alone(name: str = "llama") -> Recorded:
    model = build_model(name)
    return train(model, lambda batch, count: model(**batch).loss * targets([batch]) / count)


def annotate(mesh: DeviceMesh, packing: Any = None, inner: Any = "eager") -> cp.Sharding:
    torch._dynamo.reset()
    packing = packing or cp.PositionIds("position_ids")
    tokens = {name: dim for name, dim in TOKENS.items() if name != "position_ids" or name == packing.arg}
    return cp.Sharding(mesh, tokens, packing, inner=inner)


def train_sharded(mesh: DeviceMesh, kind: str, name: str = "llama", inner: Any = "eager", **more: Any) -> Recorded:
    # nanoGPT knows of no documents.
    sharding = replace(annotate(mesh, inner=inner), across_documents=name == "nanogpt")
    plain = build_model(name)
    if more.pop("checkpointing", False):
        plain.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    model = cp.parallelize(plain, mesh, sharding, **KINDS[kind], **more)
    counters.clear()

    def loss_of(batch: dict[str, Tensor], count: Tensor) -> Tensor:
        with sharding.shard({**batch, "num_items_in_batch": count}, shift_labels=True) as local:
            return model(**local).loss

    recorded, counted = train(model, loss_of), counters["cp_rewrite"]
    segments = counted["segments"], counted["segments compiled"]
    assert segments == CLASSES.get((name, kind), segments)
    return recorded


def compare(expected: Recorded, found: Recorded, limit: float = LIMIT) -> None:
    for (losses, norm, values), (their_losses, their_norm, theirs) in zip(expected, found, strict=True):
        assert their_losses == pytest.approx(losses, rel=limit)
        assert their_norm == pytest.approx(norm, rel=limit)
        assert_gradients(theirs, values, limit)


@pytest.mark.parametrize(
    "kind", ["by blocks", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("whole", "ddp"))]
)
def test_steps_equal_one_process(pair: Pool, kind: str) -> None:
    """Losses, all gradients, their norm and the weights, with accumulation and clipping."""
    expected = train_alone()
    for found in pair.run(2, train_sharded, kind):
        compare(expected, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("llama", "by blocks", {"inner": "aot_eager"}),
        ("llama", "by blocks", {"inner": "inductor"}),
        ("llama", "by blocks", {"checkpointing": True, "inner": "aot_eager"}),
        ("llama", "by blocks", {"reshard_after_forward": False}),
        ("gemma3", "by blocks", {"inner": "aot_eager"}),
        ("gpt2", "by blocks", {}),
        ("mixtral", "by blocks", {}),
        ("torchtitan", "whole", {}),
        ("nanogpt", "ddp", {}),
    ],
)
def test_models_and_options(pair: Pool, name: str, kind: str, options: dict[str, Any]) -> None:
    expected = train_alone(name)
    for found in pair.run(2, with_options, name, kind, options):
        compare(expected, found)


def with_options(mesh: DeviceMesh, name: str, kind: str, options: dict[str, Any]) -> Recorded:
    return train_sharded(mesh, kind, name, **options)


def train_in_groups(mesh: DeviceMesh, kind: str) -> Recorded:
    """Two groups of two ranks; each takes one of a step's rows."""
    grid = DeviceMesh("cpu", mesh.mesh.view(2, 2), mesh_dim_names=("dp", "cp"))
    sharding = annotate(grid["cp"])
    model = cp.parallelize(build_model("llama"), grid, sharding, **KINDS[kind])

    def loss_of(batch: dict[str, Tensor], count: Tensor) -> Tensor:
        with sharding.shard({**batch, "num_items_in_batch": count}, shift_labels=True) as local:
            return model(**local).loss

    recorded: Recorded = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in STEPS:
        batches = [make_batch(row) for row in rows]
        loss = loss_of(batches[grid.get_local_rank("dp")], targets(batches) / 2)
        loss.backward()
        torch.distributed.all_reduce(total := loss.detach(), group=grid["dp"].get_group())
        recorded.append(([float(total) / 2], 0.0, gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    return recorded


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_groups_equal_one_process(pool: Pool, kind: str) -> None:
    """Gradients of groups are averaged: each divides by half of the targets of all."""
    model, expected = build_model("llama"), Recorded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in STEPS:
        batches = [make_batch(row) for row in rows]
        losses = [model(**batch).loss * targets([batch]) / targets(batches) for batch in batches]
        loss = torch.stack(losses).sum()
        loss.backward()
        expected.append(([float(loss)], 0.0, gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    for found in pool.run(4, train_in_groups, kind):
        compare(expected, found)


def save_and_resume(mesh: DeviceMesh, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Weights after a step; after two; after one, a checkpoint, and one more of a fresh model on `meta` before it."""

    def fresh(device: str) -> tuple[nn.Module, torch.optim.Optimizer, cp.Sharding]:
        sharding = annotate(mesh)
        plain = build_model("llama")
        model = cp.parallelize(plain if device == "cpu" else plain.to(device), mesh, sharding)
        if device == "meta":
            model.to_empty(device="cpu")
            for name, buffer in build_model("llama").named_buffers():  # rotary frequencies are in no checkpoint
                model.get_buffer(name).copy_(buffer)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2), sharding

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, sharding: cp.Sharding, rows: Any) -> None:
        with sharding.shard(make_batch(rows), shift_labels=True) as local:
            model(**local).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, sharding = fresh("cpu")
    step(model, optimizer, sharding, STEPS[0][0])
    first = whole(dict(model.named_parameters()))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    step(model, optimizer, sharding, STEPS[1][0])
    second = whole(dict(model.named_parameters()))
    model, optimizer, sharding = fresh("meta")
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    step(model, optimizer, sharding, STEPS[1][0])
    return first, second, whole(dict(model.named_parameters()))


@pytest.mark.slow
def test_save_and_resume(pair: Pool, tmp_path: Path) -> None:
    """The same weights as without a stop; one process loads the checkpoint too."""
    saved: dict[str, Tensor] = {}
    for saved, second, resumed in pair.run(2, save_and_resume, str(tmp_path)):
        assert all(torch.equal(resumed[name], weight) for name, weight in second.items())
        assert any(not torch.equal(saved[name], weight) for name, weight in second.items())
    alone = build_model("llama")
    weights = alone.state_dict()
    dcp.load({"model": weights}, checkpoint_id=str(tmp_path), no_dist=True)
    assert all(torch.equal(weights[name], weight) for name, weight in saved.items())


def outside_of_batches(mesh: DeviceMesh) -> list[str]:
    """Errors of calls outside of a batch. The plain model runs there, and evaluation is right."""
    sharding, plain, batch = annotate(mesh), build_model("llama"), make_batch([[13, 1, 7, 11]])
    model = cp.parallelize(build_model("llama"), mesh, sharding)
    expected = plain.eval()(**batch)
    model.eval()
    with torch.no_grad():
        assert torch.allclose(model(**batch).logits, expected.logits, atol=1e-5)
        with sharding.shard(batch, shift_labels=True) as local:
            found = model(**local)
    assert torch.allclose(found.loss, expected.loss, rtol=LIMIT)
    assert torch.allclose(sharding.unshard(found.logits, 1), expected.logits, atol=1e-5)
    errors: list[str] = []
    for call in (
        lambda: model(**batch),
        lambda: cp.sum_gradients(model.parameters(), sharding),
        lambda: cp.parallelize(model, mesh, sharding),
        lambda: torch.export.export(model, (), batch),
    ):
        with pytest.raises((RuntimeError, TypeError, ValueError)) as raised:
            call()
        errors.append(str(raised.value))
    return errors


@pytest.mark.slow
def test_outside_of_batches(pair: Pool) -> None:
    """Whole rows without gradients run on the plain model; with gradients they would count once per rank."""
    for errors in pair.run(2, outside_of_batches):
        for error, words in zip(
            errors,
            ("inside `with sharding.shard", "leave out sum_gradients", "once", "export the plain model"),
            strict=True,
        ):
            assert words in error


def half_precision(mesh: DeviceMesh) -> tuple[float, set[torch.dtype]]:
    sharding = annotate(mesh)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = cp.parallelize(build_model("llama"), mesh, sharding, mp_policy=policy)
    with sharding.shard(make_batch(STEPS[0][0]), shift_labels=True) as local:
        loss = model(**local).loss
    loss.backward()
    return float(loss), {p.grad.dtype for p in model.parameters() if p.grad is not None}


@pytest.mark.slow
def test_half_precision_weights(pair: Pool) -> None:
    expected = build_model("llama").bfloat16()(**make_batch(STEPS[0][0])).loss
    for loss, dtypes in pair.run(2, half_precision):
        assert loss == pytest.approx(float(expected), rel=1e-2)
        assert dtypes == {torch.float32}


def wrapped_already(mesh: DeviceMesh) -> list[str]:
    """Notes of the errors for a compiled DDP, and for blocks that were sharded before the model was compiled."""
    sharding, batch, notes = annotate(mesh), make_batch([[13, 1, 7, 11]]), list[str]()
    by_blocks: Any = build_model("llama")
    for layer in by_blocks.model.layers:
        fully_shard(layer, mesh=mesh)
    for model in (DistributedDataParallel(build_model("llama")), fully_shard(by_blocks, mesh=mesh)):
        run = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
        with pytest.raises(Unsupported) as raised, sharding.shard(batch, shift_labels=True) as local:
            run(**local)
        notes.append(" ".join(raised.value.__notes__))
    return notes


def test_models_that_are_wrapped_already(pair: Pool) -> None:
    for ddp, fsdp in pair.run(2, wrapped_already):
        assert "data_parallel='ddp'" in ddp
        assert "wrap the plain model" in fsdp
