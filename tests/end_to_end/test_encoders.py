"""Qwen VL with images, whose encoder runs outside of the graph: losses and all gradients against one process."""

from __future__ import annotations

import inspect
import itertools
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

import cp_rewrite as cp
from tests.helpers.amount import some
from tests.helpers.images import (
    IDS,
    KINDS,
    PATCHES,
    ROPE,
    TOKENS,
    Document,
    Step,
    annotate,
    build,
    packed,
    rows,
    same,
    with_video,
)
from tests.helpers.pool import Pool
from tests.helpers.versions import traces_images
from tests.sweep.configs import class_of, small_config

pytestmark = traces_images
LIMIT = 1e-5
BATCHES: list[list[Document]] = [
    [(3, (4, 4), 2, (2, 6), 7), (9,)],
    [(20,), (13,)],
    [(2, (8, 8), 1), (5, (4, 4), 1, (2, 2), 3)],
    [(5, (12, 4), 9)],
    [(40,), (1, (4, 4))],
    [(30, (2, 2))],
]
"""Images at uneven places, across the border of two ranks' tokens, on one rank alone, of one token; a batch without
images after one with; one document that is all image but for three tokens."""


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients of all weights that have one; they have none afterwards."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {n.removeprefix("module."): x.full_tensor() if isinstance(x, DTensor) else x for n, x in found.items()}


def step(model: nn.Module, loss: Tensor) -> Step:
    loss.backward()
    return loss.item(), gradients(model)


def ready(kind: str, frozen: bool) -> Any:
    model = build(kind)
    model.model.visual.requires_grad_(not frozen)
    return model


def alone(kind: str, frozen: bool, batches: Any) -> list[Step]:
    model = ready(kind, frozen)
    return [step(model, model(**packed(model, *documents)).loss) for documents in batches]


def on_ranks(mesh: DeviceMesh, kind: str, how: str, frozen: bool, inner: str, batches: Any) -> list[Step]:
    sharding, plain = annotate(mesh, inner=inner), ready(kind, frozen)
    if how == "own loop":
        model: Any = torch.compile(plain, backend=cp.backend(sharding), fullgraph=True)
    else:
        model = cp.parallelize(plain, mesh, sharding, data_parallel="ddp" if how == "ddp" else "fsdp")
    found: list[Step] = []
    for documents in batches:
        with sharding.shard(packed(plain, *documents), shift_labels=True) as local:
            loss = model(**local).loss
        if how == "own loop":
            total = sharding.whole(loss).item()
            loss.backward()
            cp.sum_gradients(plain.parameters(), sharding)
            found.append((total, gradients(plain)))
        else:
            found.append(step(model, loss))
    return found


def test_images_are_those_of_one_process(pool: Pool) -> None:
    batches = BATCHES[:2]
    for found in pool.run(2, on_ranks, "Qwen2VL", "own loop", False, "eager", batches):
        same(alone("Qwen2VL", False, batches), found)


CASES = [*itertools.product(KINDS, ("own loop", "fsdp", "ddp"), (2, 3), (False, True))]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how", "ranks", "frozen"), some(CASES))
def test_trainings_over_batches_with_and_without_images(
    pool: Pool, kind: str, how: str, ranks: int, frozen: bool
) -> None:
    expected = alone(kind, frozen, BATCHES)
    assert ("model.visual.patch_embed.proj.weight" in expected[0][1]) != frozen
    for found in pool.run(ranks, on_ranks, kind, how, frozen, "eager", BATCHES):
        same(expected, found)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_other_compilers(pool: Pool, inner: str) -> None:
    batches = [BATCHES[0], BATCHES[2]]
    for found in pool.run(2, on_ranks, "Qwen3VL", "own loop", False, inner, batches):
        same(alone("Qwen3VL", False, batches), found)


def test_two_rows_and_a_dry_run() -> None:
    """Another model of the same class comes after the first: each runs its own encoder."""
    rows = [[(3, (4, 4), 13)], [(2, (2, 6), 4, (2, 4), 9)]]
    for seed in range(2):
        model = build("Qwen3VL")
        nn.init.normal_(model.model.visual.merger.linear_fc2.weight, std=0.1 + seed)
        parts = [packed(model, *documents, seed=seed) for documents in rows]
        batch = {
            name: torch.cat([part[name] for part in parts], 1 if name == "position_ids" else 0) for name in parts[0]
        }
        assert batch["input_ids"].shape == (2, 20)
        assert cp.explain(model, annotate(2), shift_labels=True)(**batch).ok
        assert cp.check(model, annotate(2), batch, shift_labels=True).largest <= LIMIT


def test_an_encoder_that_draws_random_numbers_is_refused() -> None:
    model = build("Qwen2VL")
    model.model.visual.blocks[0].mlp.act = nn.Dropout(0.1)
    batch = packed(model, *BATCHES[0])
    with pytest.raises(cp.RewriteRefused, match="get_image_features draws random numbers") as refused:
        cp.check(model, annotate(2), batch, shift_labels=True)
    assert {refusal.reason.name for refusal in refused.value.refusals} == {"DROPOUT"}
    assert cp.check(model.eval(), annotate(2), batch, shift_labels=True).largest <= LIMIT


def test_images_that_are_read_one_by_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are one tensor in the graph."""
    model = build("Qwen2VL")
    batch = packed(model, *BATCHES[0])
    assert cp.explain(model, annotate(2), shift_labels=True)(**batch).ok
    code = textwrap.dedent(inspect.getsource(Qwen2VLModel.forward)).partition("def ")
    scaled = "torch.cat([x * (i + 1) for i, x in enumerate(image_embeds)]"
    names: dict[str, Any] = {}
    exec("def " + code[2].replace("torch.cat(image_embeds", scaled), vars(modeling_qwen2_vl), names)
    monkeypatch.setattr(Qwen2VLModel, "forward", names["forward"])
    with pytest.raises(Unsupported, match="an encoder gives a tensor for each image"):
        cp.explain(model, annotate(2), shift_labels=True)(**batch)


def test_positions_that_a_model_would_make_of_a_ranks_tokens_are_refused() -> None:
    model = build("Qwen2VL")
    batch = rows((3, (4, 4), 20))
    tokens = {"input_ids": 1, "mm_token_type_ids": 1, "labels": 1}
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match="call get_rope_index of the model before shard"):
        cp.check(model, cp.Sharding(2, tokens, cp.WholeRows(), inner="eager"), batch, shift_labels=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_blocks_of_text_and_images(kind: str) -> None:
    model = build(kind)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert cp.check(model.train(), annotate(2), packed(model, *BATCHES[0]), shift_labels=True).largest <= LIMIT


@pytest.mark.slow
def test_images_and_videos_in_one_batch() -> None:
    """Qwen3-VL's are refused: it picks tokens by a mask to join what its encoder gives."""
    for kind in ("Qwen2VL", "Qwen2_5_VL"):
        model = build(kind)
        assert cp.check(model, annotate(2), with_video(model), shift_labels=True).largest <= LIMIT
    model = build("Qwen3VL")
    with pytest.raises(cp.RewriteRefused, match=r"image_mask\[visual_pos_masks\]"):
        cp.check(model, annotate(2), with_video(model), shift_labels=True)


_DEEP = {"depth": 3, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "num_position_embeddings": 16}
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3VLMoeForConditionalGeneration": ({**_DEEP, "deepstack_visual_indexes": [0, 1]}, {}),
    "Qwen3_5ForConditionalGeneration": ({**_DEEP, "deepstack_visual_indexes": []}, {"partial_rotary_factor": 1.0}),
    "Glm4vForConditionalGeneration": ({**_DEEP, "image_size": 16}, {}),
}
"""Classes -> the config of their encoder, and what their RoPE needs besides."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_that_are_given_sizes(name: str) -> None:
    """A model of experts, a hybrid with recurrent states, and one of another family."""
    torch.manual_seed(0)
    kind, (vision, rope) = class_of(name), OTHERS[name]
    parts = {**ROPE, **rope}
    text = small_config(kind.config_class.sub_configs["text_config"], rope_parameters=parts)
    model = kind(kind.config_class(text_config=text.to_dict(), vision_config={**PATCHES, **vision}, **IDS))
    batch = rows((3, (4, 4), 20), (9, (2, 6), 1, (4, 4), 10))
    given = batch["input_ids"], batch.pop("mm_token_type_ids"), batch["image_grid_thw"]
    batch["position_ids"], _ = model.model.get_rope_index(*given)
    torch._dynamo.reset()
    sharding = cp.Sharding(2, TOKENS, cp.WholeRows(), inner="eager")
    assert cp.check(model, sharding, batch, shift_labels=True).largest <= LIMIT


def late(mesh: DeviceMesh) -> list[str]:
    """Errors of a compiled model once its encoder draws random numbers, and of one whose encoder differs by rank."""
    found: list[str] = []
    for case in ("drawn", "other weights"):
        model, sharding = build("Qwen2VL").eval(), annotate(mesh)
        compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
        block, local_rank = model.model.visual.blocks[0], torch.distributed.get_rank()
        if case == "drawn":
            block.mlp.act = nn.Dropout(0.1).eval()
            with sharding.shard(packed(model, *BATCHES[0]), shift_labels=True) as local:
                compiled(**local)
            block.mlp.act.train()
        else:
            nn.init.constant_(block.norm1.weight, 1.0 + local_rank)
        with sharding.shard(packed(model, *BATCHES[0]), shift_labels=True) as local:
            try:
                compiled(**local)
            except RuntimeError as error:
                found.append(str(error))
    return found


@pytest.mark.slow
def test_what_an_encoder_does_on_each_rank_by_itself_is_an_error(pool: Pool) -> None:
    for drawn, weights in pool.run(2, late):
        assert "get_image_features draws random numbers" in drawn
        assert "norm1.weight" in weights


def in_groups(mesh: DeviceMesh, how: str, rows: list[list[Document]]) -> list[Step]:
    """Two groups of two ranks, each with a row of its own."""
    grid = DeviceMesh("cpu", mesh.mesh.view(2, 2), mesh_dim_names=("dp", "cp"))
    sharding, plain = annotate(grid["cp"]), build("Qwen2VL")
    model = cp.parallelize(plain, grid, sharding, data_parallel="ddp" if how == "ddp" else "fsdp")
    batch = packed(plain, *rows[torch.distributed.get_rank() // 2])
    with sharding.shard(batch, shift_labels=True) as local:
        loss = model(**local).loss
    return [step(model, loss)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_groups_of_ranks_with_rows_of_their_own(pool: Pool, how: str) -> None:
    """With DDP one group may have no images; FSDP would wait for it."""
    rows = [BATCHES[0], BATCHES[1] if how == "ddp" else BATCHES[3]]
    (one, first), (other, second) = alone("Qwen2VL", False, rows)
    mean = {name: (first[name] + second.get(name, 0.0)) / 2 for name in first}
    for rank, found in enumerate(pool.run(4, in_groups, how, rows)):
        same([(other if rank > 1 else one, mean)], found)


@pytest.mark.slow
def test_groups_without_images_are_an_error_of_all_ranks_under_fsdp(pool: Pool) -> None:
    with pytest.raises(AssertionError, match="some groups of ranks have pixel_values in this step"):
        pool.run(4, in_groups, "fsdp", [BATCHES[0], BATCHES[1]])
