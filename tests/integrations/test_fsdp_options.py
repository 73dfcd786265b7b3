"""What `cp.parallelize` passes on to FSDP2, on gloo against one process: which weights stay whole behind the forward,
which are asked for ahead, over which ranks they are copied, in which dtype gradients are summed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

import cp_rewrite as cp
from tests.end_to_end.test_end_to_end import make_batch
from tests.helpers.models import build_model
from tests.helpers.one_process import assert_gradients
from tests.helpers.pool import Pool
from tests.integrations.test_parallelize import LIMIT, STEPS, annotate, targets, whole

MODEL = "smollm3"
"""It has four layers."""
ROWS = [STEPS[0][0], STEPS[1][0], STEPS[0][1]]
"""Documents of each step."""
Steps = tuple[list[float], dict[str, Tensor]]
"""The loss of each step, and the weights behind the last."""


def train(
    model: nn.Module, loss_of: Callable[[dict[str, Tensor]], Tensor], behind_backward: Callable[[], object] = int
) -> Steps:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), list[float]()
    for rows in ROWS:
        loss = loss_of(make_batch(rows))
        loss.backward()
        losses.append(loss.item())
        behind_backward()
        optimizer.step()
        optimizer.zero_grad()
    model.zero_grad()
    return losses, whole(dict(model.named_parameters()))


def train_alone() -> Steps:
    model = build_model(MODEL)
    return train(model, lambda batch: model(**batch).loss)


def assert_equal(expected: Steps, found: Steps, limit: float = LIMIT) -> None:
    assert found[0] == pytest.approx(expected[0], rel=limit)
    assert_gradients(found[1], expected[1], limit)


def asked_for(blocks: list[nn.Module], run: Callable[[], object]) -> list[tuple[int, list[int]]]:
    """Calls by which blocks ask for weights of others in their forward: which block, for those of which."""
    asked: list[tuple[int, list[int]]] = []

    def note(place: int, block: Any, others: list[nn.Module]) -> None:
        if others:
            asked.append((place, [*map(blocks.index, others)]))
        type(block).set_modules_to_forward_prefetch(block, others)

    for place, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch = partial(note, place, block)  # type: ignore[assignment]
    run()
    return asked


def train_sharded(
    mesh: DeviceMesh, dropped: bool | int, evaluates: bool, options: dict[str, Any]
) -> tuple[Steps, list[tuple[int, list[int]]], int]:
    """Steps, what blocks ask for in a forward, and how many are whole behind it.

    Args:
        dropped: whether weights are, behind the forward; or those of how many layers.
        evaluates: the plain and the parallel model run without gradients behind each backward.
    """
    sharding, plain = annotate(mesh), build_model(MODEL)
    layers: Any = plain.model.layers  # type: ignore[union-attr]
    resharded = dropped if isinstance(dropped, bool) else layers[:dropped]
    model: Any = cp.parallelize(plain, mesh, sharding, reshard_after_forward=resharded, **options)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        with sharding.shard({**batch, "num_items_in_batch": targets([batch])}, shift_labels=True) as local:
            return model(**local).loss

    def evaluate() -> None:
        with torch.no_grad():
            model(**make_batch([[5, 6]]))
            loss_of(make_batch([[9, 8, 4]]))

    steps = train(model, loss_of, evaluate if evaluates else int)
    batch, blocks = make_batch(ROWS[0]), [*layers]
    asked = asked_for(blocks, lambda: loss_of(batch))
    return steps, asked, sum(not isinstance(next(block.parameters()), DTensor) for block in blocks)


@pytest.mark.parametrize(
    ("dropped", "evaluates", "options", "asked", "whole_ones"),
    [
        (2, True, {"prefetch": 2}, [(0, [1, 2]), (1, [2, 3]), (2, [3])], 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (True, True, {}, [], 0),
                (False, False, {}, [], 4),
                (False, True, {"prefetch": 9}, [(0, [1, 2, 3]), (1, [2, 3]), (2, [3])], 4),
                (True, False, {"prefetch": 1}, [(0, [1]), (1, [2]), (2, [3])], 0),
            ]
        ),
    ],
)
def test_options_train_as_one_process(
    pair: Pool, dropped: bool | int, evaluates: bool, options: dict[str, Any], asked: Any, whole_ones: int
) -> None:
    """An evaluation behind the backward leaves no weights behind that the optimizer's step misses."""
    expected = train_alone()
    for steps, seen, left in pair.run(2, train_sharded, dropped, evaluates, options):
        assert_equal(expected, steps)
        assert seen == asked
        assert left == whole_ones


def written_by_hand(mesh: DeviceMesh | None, options: dict[str, Any]) -> list[float]:
    """Losses without gradients, in and outside of a batch's block, before and behind writes to all weights."""
    plain, batch = build_model(MODEL), make_batch(ROWS[0])
    loss_of: Callable[[], Tensor] = lambda: plain(**batch).loss  # noqa: E731
    if mesh is not None:
        sharding = annotate(mesh)
        model: Any = cp.parallelize(plain, mesh, sharding, **options)

        def loss_of() -> Tensor:
            with sharding.shard({**batch, "num_items_in_batch": targets([batch])}, shift_labels=True) as local:
                return model(**local).loss

    found, held = list[float](), [*plain.parameters()]
    for turn, factor in enumerate((1.0, 0.5, 2.0, 0.25)):
        with torch.no_grad():
            for weight in held if turn % 2 else plain.parameters():
                weight.mul_(factor)
            found += plain(**make_batch([[5, 6]])).loss.item(), loss_of().item()
    return found


@pytest.mark.parametrize("whole", [False, True])
def test_evaluations_see_weights_that_were_written_by_hand(pair: Pool, whole: bool) -> None:
    expected = written_by_hand(None, {})
    assert len({round(loss, 3) for loss in expected[::2]}) > 1
    for found in pair.run(2, written_by_hand, {"reshard_after_forward": not whole}):
        assert found == pytest.approx(expected, rel=LIMIT)


def written_while_whole(mesh: DeviceMesh) -> tuple[str, Tensor]:
    """The error of a call behind a write to weights that the call before left whole; the first behind the next call."""
    sharding, plain = annotate(mesh), build_model("tiny")
    model: Any = cp.parallelize(plain, mesh, sharding)

    def call() -> None:
        with sharding.shard(make_batch([[5, 6]]), shift_labels=True) as local:
            model(**local)

    call()
    with torch.no_grad():
        for weight in plain.parameters():
            weight.mul_(0.5)
        with pytest.raises(RuntimeError) as raised:
            call()
        call()
    return str(raised.value), whole(dict(plain.named_parameters()))["embed.weight"]


def test_writes_that_shards_never_have_are_errors(pair: Pool) -> None:
    for error, weight in pair.run(2, written_while_whole):
        assert "embed.weight was written to between a call of the model and its backward" in error
        assert weight.equal(build_model("tiny").embed.weight)  # type: ignore[union-attr, arg-type]


def trained_after_inference(mesh: DeviceMesh | None, options: dict[str, Any]) -> Steps:
    """Steps of a model whose first call, in a batch's block, and whose first outside of one are in inference mode."""
    sharding, plain = None if mesh is None else annotate(mesh), build_model("llama")
    model: Any = plain if mesh is None or sharding is None else cp.parallelize(plain, mesh, sharding, **options)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        if sharding is None:
            return model(**batch).loss
        with sharding.shard({**batch, "num_items_in_batch": targets([batch])}, shift_labels=True) as local:
            return model(**local).loss

    with torch.inference_mode():
        before = [loss_of(make_batch(ROWS[0])).item(), plain(**make_batch([[5, 6]])).loss.item()]
    losses, weights = train(plain, loss_of)
    return before + losses, weights


@pytest.mark.parametrize(
    "options", [{"prefetch": 1}, pytest.param({"reshard_after_forward": False}, marks=pytest.mark.slow)]
)
def test_a_model_trains_after_inference(pair: Pool, options: dict[str, Any]) -> None:
    """FSDP keeps what it gathers a weight into first."""
    expected = trained_after_inference(None, {})
    for found in pair.run(2, trained_after_inference, options):
        assert_equal(expected, found)


def sums_in_half(mesh: DeviceMesh) -> tuple[Steps, set[torch.dtype]]:
    """Steps with gradients that are summed in bf16, and the dtypes of gradients."""
    sharding, dtypes = annotate(mesh), set[torch.dtype]()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model: Any = cp.parallelize(build_model(MODEL), mesh, sharding, mp_policy=policy)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        with sharding.shard({**batch, "num_items_in_batch": targets([batch])}, shift_labels=True) as local:
            return model(**local).loss

    steps = train(model, loss_of, lambda: dtypes.update(p.grad.dtype for p in model.parameters()))
    return steps, dtypes


@pytest.mark.slow
def test_gradients_that_are_summed_in_bf16(pair: Pool) -> None:
    """They are rounded twice, to 1 / 256 of each: close to one process, not equal to it."""
    losses, weights = train_alone()
    for (found, theirs), dtypes in pair.run(2, sums_in_half):
        assert found == pytest.approx(losses, rel=2e-3)
        start = dict(build_model(MODEL).named_parameters())
        moved = [(theirs[name] - weights[name], weights[name] - start[name]) for name in weights]
        errors = [float(error.norm() / way.norm()) for error, way in moved]
        assert LIMIT < max(errors) < 2e-2
        assert dtypes == {torch.float32}


def copied_over_groups(mesh: DeviceMesh, shape: list[int], names: list[str], replicate: Any) -> tuple[Steps, list[str]]:
    """Steps of groups that get the same rows, and how weights lie."""
    grid = DeviceMesh("cpu", mesh.mesh.view(shape), mesh_dim_names=tuple(names))
    sharding = annotate(grid["cp"])
    model: Any = cp.parallelize(build_model(MODEL), grid, sharding, replicate=replicate, prefetch=1)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        with sharding.shard({**batch, "num_items_in_batch": targets([batch])}, shift_labels=True) as local:
            return model(**local).loss

    steps = train(model, loss_of)
    norm: Any = cp.clip_grad_norm_(model.parameters(), 1.0)
    assert norm == 0
    placements = {p.placements for p in model.parameters()}
    assert placements == {(Replicate(), Shard(0))}
    weight = next(iter(model.parameters()))
    return steps, [str(weight.device_mesh.mesh.tolist())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "names", "replicate", "ranks"),
    [
        ([2, 2], ["dp", "cp"], "dp", [[0, 1], [2, 3]]),
        ([2, 1, 2], ["replicas", "dp", "cp"], ("replicas",), [[0, 1], [2, 3]]),
        ([2, 2], ["cp", "dp"], ["cp"], [[0, 1], [2, 3]]),
    ],
)
def test_copies_of_shards_train_as_one_process(
    pool: Pool, shape: list[int], names: list[str], replicate: Any, ranks: list[list[int]]
) -> None:
    expected = train_alone()
    for steps, meshes in pool.run(4, copied_over_groups, shape, names, replicate):
        assert_equal(expected, steps)
        assert meshes == [str(ranks)]


def refused(mesh: DeviceMesh) -> list[str]:
    """Errors of options that do not go, each before anything is changed."""
    grid = DeviceMesh("cpu", mesh.mesh.view(1, 2), mesh_dim_names=("dp", "cp"))
    sharding, model, found = annotate(grid["cp"]), build_model(MODEL), list[str]()
    for options in (
        {"prefetch": 0},
        {"prefetch": True},
        {"replicate": "cp"},
        {"replicate": ("dp", "cp")},
        {"replicate": "pp"},
        {"replicate": "dp", "experts": 2},
        {"reshard_after_forward": 2},
        {"reshard_after_forward": [nn.Linear(2, 2)]},
        {"reshard_after_forward": "model.layers"},
        {"data_parallel": "ddp", "prefetch": 1},
        {"data_parallel": "ddp", "reshard_after_forward": False},
    ):
        with pytest.raises((TypeError, ValueError)) as raised:
            cp.parallelize(model, grid, sharding, **options)  # type: ignore[arg-type]
        found.append(str(raised.value))
        assert not any(isinstance(p, DTensor) for p in model.parameters())
    return found


def test_options_that_do_not_go(pair: Pool) -> None:
    words = [
        "prefetch must be >= 1",
        "prefetch must be a whole number",
        *["replicate must name the first dims of mesh, ('dp', 'cp')"] * 3,
        "leave replicate out",
        *["reshard_after_forward must be True, False, or some of the blocks"] * 3,
        *["are FSDP's: leave them out"] * 2,
    ]
    for errors in pair.run(2, refused):
        for error, said in zip(errors, words, strict=True):
            assert said in error
