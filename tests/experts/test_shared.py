"""`cp.parallelize(…, experts=n)` on gloo against one process: losses, gradients, norms and weights of two steps."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import cp_rewrite as cp
from cp_rewrite.experts.dispatch import join_group
from cp_rewrite.torch_internals import shards_over_some
from tests.end_to_end.test_end_to_end import TOKENS, make_batch
from tests.helpers import models
from tests.helpers.one_process import assert_gradients
from tests.helpers.pool import Pool

LIMIT = 1e-5
STEPS = [
    [[13, 1, 7, 11], [5, 3, 9, 2, 6, 7], [30, 3], [17]],
    [[40, 1], [8, 8, 8, 7], [3, 4, 5, 6], [29, 2, 2]],
]
"""Documents of the row of each group, for each step: tokens that ranks do not divide, other ones in each group."""
Recorded = list[tuple[list[float], float, dict[str, Tensor]]]
"""Per step: each row's loss, the norm of the gradients before it is cut, and the gradients; then the weights."""


OWN_WAY = {
    "aria": models.Recipe("AriaText", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    "jetmoe": models.Recipe("JetMoe", {"num_local_experts": 4, "kv_channels": 8}),
}
"""Models with experts outside of transformers' interface."""


def build(name: str, **options: Any) -> nn.Module:
    """A model of `models.RECIPES`; routers are drawn wide, so that choices are no ties, and biases are there.
    `adapters`: of PEFT's LoRA, beside which all else is frozen."""
    torch.manual_seed(0)
    recipe, adapters = {**models.RECIPES, **OWN_WAY}[name], options.pop("adapters", None)
    model: Any = models._from_transformers(dataclasses.replace(recipe, options={**recipe.options, **options}), True)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "bias" in key or "gate.weight" in key or "router" in key:
                p.normal_(0, 0.5)
    if adapters is None:
        return model
    peft: Any = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **adapters))


def whole(values: dict[str, Any]) -> dict[str, Tensor]:
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone() for name, x in values.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return whole({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def alone(name: str, groups: int, options: dict[str, Any]) -> Recorded:
    model = build(name, **options)
    optimizer, recorded = torch.optim.SGD(model.parameters(), lr=0.3), Recorded()
    for rows in STEPS:
        losses = [model(**make_batch([row])).loss for row in rows[:groups]]
        torch.stack(losses).mean().backward()
        norm = float(cp.clip_grad_norm_(model.parameters(), 0.5))
        recorded.append(([loss.item() for loss in losses], norm, gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    return [*recorded, ([], 0.0, whole(dict(model.named_parameters())))]


def annotated(mesh: DeviceMesh, name: str, **how: Any) -> cp.Sharding:
    torch._dynamo.reset()
    how = {"inner": "eager", "across_documents": name in ("gpt_oss", "llama4"), **how}
    return cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), **how)


def on_ranks(
    mesh: DeviceMesh, name: str, groups: int, shared: int, options: dict[str, Any], checkpointing: bool,
    how: dict[str, Any],
) -> tuple[Recorded, tuple[int, int]]:  # fmt: skip
    """The same; and segments of the graph, and how many were compiled."""
    grid = DeviceMesh("cpu", mesh.mesh.view(groups, -1), mesh_dim_names=("dp", "cp"))
    sharding, group = annotated(grid["cp"], name, **how), grid.get_local_rank("dp")
    model: Any = build(name, **options)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    counters.clear()
    model = cp.parallelize(model, grid, sharding, experts=shared)
    optimizer, recorded = torch.optim.SGD(model.parameters(), lr=0.3, foreach=True), Recorded()
    for rows in STEPS:
        with sharding.shard(make_batch([rows[group]]), shift_labels=True) as local:
            loss = model(**local).loss
        loss.backward()
        norm = float(cp.clip_grad_norm_(model.parameters(), 0.5))
        recorded.append(([loss.item()], norm, gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    recorded.append(([], 0.0, whole(dict(model.named_parameters()))))
    return recorded, (counters["cp_rewrite"]["segments"], counters["cp_rewrite"]["segments compiled"])


def skip_unless_able(shared: int, ranks: int) -> None:
    """`SharedExperts` refuses by itself what a version of torch can't share."""
    if 1 < shared < ranks and not shards_over_some():
        pytest.skip("this torch's FSDP shards weights over all ranks of a mesh")


def check(
    pool: Pool, ranks: int, name: str, groups: int, shared: int, options: dict[str, Any] | None = None,
    checkpointing: bool = False, **how: Any,
) -> tuple[int, int]:  # fmt: skip
    skip_unless_able(shared, ranks)
    options = options or {}
    expected = alone(name, groups, options)
    results = pool.run(ranks, on_ranks, name, groups, shared, options, checkpointing, how)
    for rank, (found, _) in enumerate(results):
        for (losses, norm, values), (theirs, their_norm, their_values) in zip(expected, found, strict=True):
            assert theirs == pytest.approx(losses[rank // (ranks // groups) :][:1], rel=LIMIT)
            assert their_norm == pytest.approx(norm, rel=LIMIT)
            assert_gradients(their_values, values, LIMIT)
    return results[0][1]


def test_two_steps_equal_one_process(pool: Pool) -> None:
    """Also that equal blocks are compiled once."""
    assert check(pool, 2, "qwen3_moe", 1, 2) == (4, 3)


BESIDE = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "modules_to_save": ["gate"]}


def test_adapters_beside_frozen_experts(pool: Pool) -> None:
    """As the refusal of those on experts advises: linear layers have some, routers are trained whole."""
    model = build("qwen3_moe", adapters=BESIDE)
    trained = {part for name, p in model.named_parameters() if p.requires_grad for part in name.split(".")}
    assert {"lora_A", "modules_to_save"} <= trained
    assert "experts" not in trained
    check(pool, 2, "qwen3_moe", 1, 2, {"adapters": BESIDE})


@pytest.mark.slow
@pytest.mark.parametrize("shared", [2, 4])
@pytest.mark.parametrize("name", ["qwen3_moe_aux_loss", "mixtral_aux_loss", "deepseek_v3", "gpt_oss"])
def test_families_in_groups(pool: Pool, name: str, shared: int) -> None:
    """Two groups of two ranks with other rows; auxiliary losses, checkpointed."""
    check(pool, 4, name, 2, shared, checkpointing=name != "gpt_oss")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "name", "groups", "shared", "options", "how"),
    [
        (3, "qwen3_moe", 1, 3, {"num_experts": 6}, {}),
        (4, "qwen3_moe", 1, 2, {}, {}),  # groups of experts inside of a context-parallel group
        (4, "qwen3_moe", 4, 2, {}, {}),  # no context parallelism
        (4, "qwen3_moe", 4, 4, {}, {}),
        (4, "gpt_oss", 2, 2, {}, {"inner": "aot_eager"}),
        (2, "qwen3_moe_aux_loss", 1, 2, {}, {"inner": "inductor"}),
        (2, "qwen3_moe", 1, 2, {"experts_implementation": "batched_mm"}, {"inner": "aot_eager", "tile": 4}),
        (2, "mixtral", 1, 2, {"experts_implementation": "eager"}, {"inner": "aot_eager"}),
        (2, "qwen3_moe", 1, 2, {"hidden_act": "gelu"}, {"layout": "head_tail"}),
    ],
)
def test_meshes_and_options(
    pool: Pool, ranks: int, name: str, groups: int, shared: int, options: dict[str, Any], how: dict[str, Any]
) -> None:
    check(pool, ranks, name, groups, shared, options, checkpointing="inner" in how and name != "gpt_oss", **how)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama4", {"num_experts_per_tok": 1}),
        pytest.param("llama4", {"num_experts_per_tok": 3}, marks=pytest.mark.slow),
        pytest.param("aria", {}, marks=pytest.mark.slow),
    ],
)
def test_families_outside_of_the_interface(pool: Pool, name: str, options: dict[str, Any]) -> None:
    check(pool, 2, name, 1, 2, options, checkpointing=True)


def accumulated(mesh: DeviceMesh, shared: int, frozen: bool) -> dict[str, Tensor]:
    """Gradients of two micro-batches of each of two groups; `frozen`: the experts get none."""
    grid = DeviceMesh("cpu", mesh.mesh.view(2, 2), mesh_dim_names=("dp", "cp"))
    sharding, group, model = annotated(grid["cp"], ""), grid.get_local_rank("dp"), build("qwen3_moe")
    freeze(model, frozen)
    model = cp.parallelize(model, grid, sharding, experts=shared)
    for rows in STEPS:
        with sharding.shard(make_batch([rows[group]]), shift_labels=True) as local:
            loss = model(**local).loss
        loss.backward()
    return gradients(model)


def freeze(model: nn.Module, frozen: bool) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_(not (frozen and "experts" in name))


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("shared", [2, 4])
def test_accumulated_gradients(pool: Pool, shared: int, frozen: bool) -> None:
    skip_unless_able(shared, 4)
    model = build("qwen3_moe")
    freeze(model, frozen)
    for rows in STEPS:
        torch.stack([model(**make_batch([row])).loss for row in rows[:2]]).mean().backward()
    for found in pool.run(4, accumulated, shared, frozen):
        assert_gradients(found, gradients(model), LIMIT)


class Routed(nn.Module):
    """A model of one's own: attention of two heads, then `cp.Experts` twice, by the same weights; `spoil`: what it does
    beside that."""

    def __init__(self, spoil: str = "", gate: str = "swiglu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spoil = spoil
        self.embed, self.qkv, self.head = nn.Embedding(64, 16), nn.Linear(16, 48), nn.Linear(16, 64)
        self.router, self.experts, self.again = nn.Linear(16, 6), layer_of(gate), layer_of(gate)
        for name, p in self.experts.named_parameters():
            nn.init.normal_(p, std=0.3)
            setattr(self.again, name, p)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, labels: Tensor | None = None, shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
    ) -> Any:  # fmt: skip
        h = self.embed(input_ids)
        documents = (position_ids == 0).cumsum(1)
        mask = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
        q, k, v = self.qkv(h).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        h = h + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        weight, chosen = self.router(h.flatten(0, 1)).softmax(-1).topk(2, -1)
        for layer in (self.experts, self.again):
            h = h + layer(h.flatten(0, 1), chosen, weight).view_as(h)
        assert self.experts.down_proj.shape[0] == self.experts.num_experts  # on ranks that have fewer, too
        loss = next_token_sum(self.head(h), labels, shift_labels)
        if self.spoil == "norm":
            loss = loss + self.experts.down_proj.norm()
        if self.spoil == "product":
            loss = loss + (h @ self.experts.down_proj[0]).sum()
        return (loss, self.experts.down_proj * 1) if self.spoil == "returned" else loss


def layer_of(gate: str) -> Any:
    """6 experts of 16 columns."""
    if gate != "step3p7":
        return cp.Experts(6, 16, 8, gate, bias=True)
    step3p7: Any = importlib.import_module("transformers.models.step3p7.modeling_step3p7")
    config = importlib.import_module("transformers").Step3p7TextConfig(
        hidden_size=16, moe_intermediate_size=8, n_routed_experts=6, num_attention_heads=2, num_key_value_heads=2
    )
    return step3p7.Step3p7Experts(config, swiglu_limit=0.1)


def next_token_sum(logits: Tensor, labels: Tensor | None, shift_labels: Tensor | None) -> Tensor:
    if shift_labels is None:
        assert labels is not None
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum")


def routed_on_ranks(mesh: DeviceMesh, gate: str) -> tuple[float, dict[str, Tensor], Tensor, dict[str, float]]:
    """Loss and gradients; the loss of the plain forward on whole rows, outside of a block; and the step's trace."""
    sharding, batch = annotated(mesh, "", inner="aot_eager"), make_batch([[13, 1, 7, 11]])
    model = cp.parallelize(Routed(gate=gate), mesh, sharding, experts=mesh.size(), blocks=())
    with torch.no_grad():
        plain = model(**batch)
    with cp.trace() as trace, sharding.shard(batch, shift_labels=True) as local:
        loss = model(**local)
    loss.backward()
    return loss.item(), gradients(model), plain, trace.last


@pytest.mark.parametrize("gate", ["swiglu", *(pytest.param(g, marks=pytest.mark.slow) for g in ("relu2", "step3p7"))])
def test_experts_of_ones_own(pool: Pool, gate: str) -> None:
    alone, chosen = Routed(gate=gate), list[Tensor]()
    alone.experts.register_forward_pre_hook(lambda _, given: chosen.append(given[1]))
    loss = alone(**make_batch([[13, 1, 7, 11]]))
    loss.backward()
    rows = [int((chosen[0] // 2 == rank).any(1).sum()) for rank in range(3)]  # a token goes once to each of its ranks
    for found, values, plain, traced in pool.run(3, routed_on_ranks, gate):
        assert (traced["expert_rows"], traced["expert_mean"]) == (max(rows), pytest.approx(sum(rows) / 3))
        assert found == pytest.approx(loss.item(), rel=LIMIT)
        assert float(plain) == pytest.approx(loss.item(), rel=LIMIT)
        assert_gradients(values, gradients(alone), LIMIT)


def test_experts_that_no_ranks_share() -> None:
    """By the backend alone: each rank has all of them, and its part of their gradients."""
    torch._dynamo.reset()
    sharding = cp.Sharding(2, TOKENS, cp.PositionIds("position_ids"))
    assert cp.check(Routed(), sharding, make_batch([[13, 1, 7, 12]]), shift_labels=True).largest <= LIMIT


def refused(mesh: DeviceMesh) -> dict[str, str]:
    """The error for each thing that can't be shared."""
    sharding, batch, found = annotated(mesh, ""), make_batch([[13, 1, 7, 11]]), dict[str, str]()
    qwen3 = functools.partial(build, "qwen3_moe")
    tries: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
        "count": (lambda: build("qwen3_moe", num_experts=5), {"experts": 2}),
        "ranks": (qwen3, {"experts": 3}),
        "kind": (qwen3, {"experts": "2"}),
        "none": (lambda: build("llama"), {"experts": 2}),
        "own way": (lambda: build("jetmoe"), {"experts": 2}),
        "ddp": (qwen3, {"experts": 2, "data_parallel": "ddp"}),
        "offload": (qwen3, {"experts": 2, "offload": ("weights",)}),
        "adapter": (_with_adapter, {"experts": 2}),
        "adapters of PEFT": (lambda: build("qwen3_moe", adapters={"target_modules": "all-linear"}), {"experts": 2}),
        "forward": (_with_forward, {"experts": 2}),
        "gate": (_with_gate, {"experts": 2}),
    }
    for name, (make, how) in tries.items():
        with pytest.raises((TypeError, ValueError)) as raised:
            cp.parallelize(make(), mesh, sharding, **how)
        found[name] = str(raised.value)
    for spoil in ("norm", "product", "returned"):
        model = cp.parallelize(Routed(spoil), mesh, annotated(mesh, ""), experts=2, blocks=())
        with pytest.raises(cp.RewriteRefused) as of_graph, sharding.shard(batch, shift_labels=True) as local:
            model(**local)
        found[spoil] = str(of_graph.value)
    plain: Any = Routed()
    plain.experts.cp_group = join_group(mesh.mesh.tolist(), mesh.get_group(), mesh.size())
    compiled = torch.compile(plain, backend=cp.backend(sharding), fullgraph=True)
    with pytest.raises(cp.RewriteRefused) as of_graph, sharding.shard(batch, shift_labels=True) as local:
        compiled(**local)
    found["backend"] = str(of_graph.value)
    return found


def _with_adapter() -> nn.Module:
    model: Any = build("qwen3_moe")
    model.model.layers[0].mlp.experts.register_parameter("lora", nn.Parameter(torch.zeros(4, 2)))
    return model


def _with_forward() -> nn.Module:
    model: Any = build("qwen3_moe")
    layer = model.model.layers[0].mlp.experts
    layer.forward = functools.partial(type(layer).forward, layer)
    return model


def _with_gate() -> nn.Module:
    """Rows are normalized by each other."""
    model: Any = build("qwen3_moe")
    layer = model.model.layers[0].mlp.experts
    layer._apply_gate = lambda rows: (rows / rows.norm()).chunk(2, -1)[0]
    return model


WORDS = {
    "count": "has 5 experts, which 2 ranks do not share evenly",
    "ranks": "must divide the 2 ranks that weights are sharded over",
    "kind": "experts must be how many ranks",
    "none": "none is a cp.Experts",
    "own way": "JetMoeParallelExperts hold experts in a way of their own",
    "ddp": "experts are FSDP's",
    "offload": "leave 'weights' out of offload",
    "adapter": "lora (4, 2)",
    "adapters of PEFT": "experts=2: adapters of PEFT on a parameter (target_parameters; target_modules='all-linear'",
    "forward": "a forward of its own",
    "gate": "gives other numbers",
    "norm": "only the layer itself may read them",
    "product": "only the layer itself may read them",
    "returned": "only the layer itself may read them",
    "backend": "cp.parallelize(…, experts=n) shares them",
}


def test_refusals(pool: Pool) -> None:
    for found in pool.run(2, refused):
        assert found.keys() == WORDS.keys()
        for name, words in WORDS.items():
            assert words in found[name], f"{name}: {found[name]}"


def half_precision(mesh: DeviceMesh, shared: int) -> tuple[float, float, set[torch.dtype]]:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    sharding = annotated(mesh, "", inner="aot_eager")
    model = cp.parallelize(build("qwen3_moe"), mesh, sharding, mp_policy=policy, experts=shared)
    with sharding.shard(make_batch([STEPS[0][0]]), shift_labels=True) as local:
        loss = model(**local).loss
    loss.backward()
    dtypes = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    return loss.item(), float(cp.clip_grad_norm_(model.parameters(), 1.0)), dtypes


@pytest.mark.slow
@pytest.mark.parametrize("shared", [2, 4])
def test_half_precision_weights(pool: Pool, shared: int) -> None:
    """Cast by FSDP where it shards them, else in the op."""
    skip_unless_able(shared, 4)
    model = build("qwen3_moe").bfloat16()
    expected = model(**make_batch([STEPS[0][0]])).loss
    expected.backward()
    norm = float(cp.clip_grad_norm_(model.parameters(), 1.0))
    for loss, found, dtypes in pool.run(4, half_precision, shared):
        assert loss == pytest.approx(expected.item(), rel=1e-2)
        assert found == pytest.approx(norm, rel=5e-2)
        assert dtypes == {torch.float32}


def trained(mesh: DeviceMesh, shared: int, folder: str, loads: bool, device: str = "cpu") -> dict[str, Tensor]:
    """Weights after a step, which are saved; or after what was saved is loaded and one more step."""
    torch._dynamo.reset()
    sharding, plain = annotated(mesh, ""), build("qwen3_moe")
    model: Any = cp.parallelize(plain.to(device), mesh, sharding, experts=shared)
    if device == "meta":
        model.to_empty(device="cpu")
        for name, buffer in build("qwen3_moe").named_buffers():
            model.get_buffer(name).copy_(buffer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    if loads:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    with sharding.shard(make_batch([STEPS[int(loads)][0]]), shift_labels=True) as local:
        model(**local).loss.backward()
    optimizer.step()
    if not loads:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    return whole(dict(model.named_parameters()))


@pytest.mark.slow
def test_checkpoints_are_elastic(pool: Pool, tmp_path: Path) -> None:
    """Saved where 2 of 4 ranks share experts; resumed with 4, with 2 on meta, without, and by one process."""
    skip_unless_able(2, 4)
    folder = str(tmp_path)
    first = pool.run(4, trained, 2, folder, False)[0]
    plain = build("qwen3_moe")
    weights = plain.state_dict()
    dcp.load({"model": weights}, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(weights[name], value) for name, value in first.items())
    resumed = [
        pool.run(4, trained, 4, folder, True)[0],
        pool.run(4, trained, 4, folder, True, "meta")[0],
        pool.run(4, trained, 2, folder, True, "meta")[0],
        pool.run(4, trained, 1, folder, True)[0],
    ]
    moved = max(float((resumed[0][name] - value).norm() / value.norm()) for name, value in first.items())
    assert moved > 1e-3
    for other in resumed[1:]:
        assert_gradients(other, resumed[0], 1e-4)  # Adam divides what is nearly 0
