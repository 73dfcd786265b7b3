"""Train beside context parallelism: a loop of accelerate, PEFT's other adapters, other libraries' optimizers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.end_to_end.test_end_to_end import make_batch
from tests.helpers.models import SMALL, build_model
from tests.helpers.pages import blocks_of
from tests.helpers.pool import Pool
from tests.helpers.versions import OLD

from .runs import FSDP, Run, compare, launched, sharding_of, whole
from .test_trl import tune

ROWS = ([[13, 1, 7, 11]], [[20, 9]], [[5, 31, 2]])
Trained = tuple[list[float], list[float], dict[str, Tensor]]
"""Losses and norms of gradients by step, and the weights after the last."""


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): whole(p) for name, p in model.named_parameters()}


def train(
    model: nn.Module,
    optimizers: list[Any],
    loss_of: Callable[[Any], Tensor],
    backward: Callable[[Tensor], Any] = Tensor.backward,
    clip: Callable[[Any, float], Any] = nn.utils.clip_grad_norm_,
) -> Trained:
    losses, norms = list[float](), list[float]()
    for rows in ROWS:
        loss = loss_of(rows)
        backward(loss)
        norms.append(float(whole(clip(model.parameters(), 1.0))))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, weights(model)


def losses_of(model: Any, sharding: cp.Sharding) -> Callable[[Any], Tensor]:
    """The loss of a parallelized model, by rows."""

    def loss_of(rows: Any) -> Tensor:
        with sharding.shard(make_batch(rows), shift_labels=True) as local:
            return model(**local).loss

    return loss_of


def by_accelerate(mesh: DeviceMesh, kind: str, prepared: str) -> Trained:
    from accelerate import Accelerator

    with launched(mesh):
        accelerator, sharding = Accelerator(cpu=True), sharding_of(mesh)
        model = cp.parallelize(build_model("llama"), mesh, sharding, data_parallel=kind)  # type: ignore[arg-type]
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if prepared == "both":
            given = model
            model, optimizer = accelerator.prepare(model, optimizer)
            assert model is given
        else:
            optimizer = accelerator.prepare(optimizer)
        loss_of = losses_of(model, sharding)
        return train(model, [optimizer], loss_of, accelerator.backward, accelerator.clip_grad_norm_)


def other_rows(mesh: DeviceMesh) -> str:
    """The error where accelerate's loader gave each rank rows of its own."""
    from accelerate import Accelerator

    with launched(mesh):
        accelerator, sharding = Accelerator(cpu=True), sharding_of(mesh)
        model = cp.parallelize(build_model("llama"), mesh, sharding)
        loader: Any = accelerator.prepare(torch.utils.data.DataLoader(range(2), batch_size=1))  # type: ignore[arg-type]
        try:
            for number in loader:
                with sharding.shard(make_batch([[12, 5 + int(number)]]), shift_labels=True) as local:
                    model(**local).loss.backward()
        except RuntimeError as error:
            return str(error)
        return ""


def by_lightning(mesh: DeviceMesh | None) -> Trained:
    """As docs/reference/integrations.md has it, with DDP; without a mesh on one process."""
    import lightning  # type: ignore[import-not-found]  # installed by no extra

    class Module(lightning.LightningModule):  # pyright: ignore[reportUntypedBaseClass, reportUnknownMemberType]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses, self.sharding = build_model("llama"), list[float](), sharding_of(mesh or 1)

        def configure_model(self) -> None:
            if mesh is not None:
                torch._dynamo.config.optimize_ddp = False
                self.model.compile(backend=cp.backend(self.sharding), fullgraph=True)

        def training_step(self, rows: Any) -> Tensor:
            if mesh is None:
                loss = self.model(**make_batch(rows)).loss
                self.losses.append(loss.item())
                return loss
            with self.sharding.shard(make_batch(rows), shift_labels=True) as local:
                loss = self.model(**local).loss
            self.losses.append(self.sharding.whole(loss).item())
            return loss * self.sharding.world_size  # of whose gradients DDP takes the mean

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.parameters(), lr=0.1)  # which sees how large gradients are

    with launched(mesh):
        module: Any = Module()
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        ways: dict[str, Any] = {"strategy": "ddp", "devices": mesh.size()} if mesh is not None else {"devices": 1}
        trainer = lightning.Trainer(  # pyright: ignore[reportUnknownMemberType]
            accelerator="cpu", max_epochs=1, use_distributed_sampler=False, **quiet, **ways
        )
        trainer.fit(module, torch.utils.data.DataLoader([*ROWS], batch_size=None))  # type: ignore[arg-type]
        return module.losses, [], weights(module.model)


def wide() -> nn.Module:
    """A model of whose weights half a matrix is not too small to be kept in eight bits."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SMALL, "hidden_size": 128, "intermediate_size": 256})
    return transformers.LlamaForCausalLM(config)


def alone(optimizers: Any, build: Any = wide) -> Trained:
    model = build()
    return train(model, optimizers(model), lambda rows: model(**make_batch(rows)).loss)


def adamw(model: nn.Module) -> list[Any]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2)]


@pytest.mark.slow
@pytest.mark.parametrize("prepared", ["optimizer", "both"])
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_loop_of_accelerate_equals_one_process(pair: Pool, kind: str, prepared: str) -> None:
    losses, norms, expected = alone(adamw, lambda: build_model("llama"))
    for found in pair.run(2, by_accelerate, kind, prepared):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(norms, rel=1e-5)
        for name, weight in expected.items():
            torch.testing.assert_close(found[2][name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_rows_that_accelerate_dealt_out_are_an_error(pair: Pool) -> None:
    assert all("rank" in said for said in pair.run(2, other_rows))


@pytest.mark.slow
def test_lightning_equals_one_process(pair: Pool) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    losses, _, expected = by_lightning(None)
    for found in pair.run(2, by_lightning):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        for name, weight in expected.items():
            torch.testing.assert_close(found[2][name], weight, rtol=1e-3, atol=1e-4)


class Muon(torch.optim.Muon):
    """Its products in fp32: rounding to bf16 would hide what else differs."""

    def step(self, *args: Any) -> Any:  # type: ignore[override]
        with patch.object(Tensor, "bfloat16", Tensor.float):
            return super().step(*args)


def muon(model: nn.Module) -> list[Any]:
    """For the matrices of blocks, as it is meant."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "layers" not in name]
    return [Muon(inner, lr=0.02), torch.optim.SGD(rest, lr=0.1)]


def eight_bits(model: nn.Module) -> list[Any]:
    import torchao.optim  # type: ignore[import-not-found]  # installed by no extra

    return [torchao.optim.AdamW8bit(model.parameters(), lr=1e-2)]


def stepped(mesh: DeviceMesh, kind: str, optimizers: Any) -> Trained:
    with launched(mesh):
        sharding = sharding_of(mesh)
        model = cp.parallelize(wide(), mesh, sharding, data_parallel=kind)  # type: ignore[arg-type]
        return train(model, optimizers(model), losses_of(model, sharding))


def changes_alike(expected: Trained, found: Trained, limit: float) -> None:
    """A part `limit` of what the steps changed of each weight may differ."""
    before = dict(wide().named_parameters())
    for name, weight in expected[2].items():
        change = float((weight - before[name].detach()).norm())
        assert float((found[2][name] - weight).norm()) <= limit * change, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_muon_equals_one_process(pair: Pool, kind: str) -> None:
    expected = alone(muon)
    for found in pair.run(2, stepped, kind, muon):
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        changes_alike(expected, found, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_eight_bits_equal_one_process(pair: Pool, kind: str) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    expected = alone(eight_bits)
    for found in pair.run(2, stepped, kind, eight_bits):
        assert found[0] == pytest.approx(expected[0], rel=1e-3)
        changes_alike(expected, found, 1e-2)


def of_bitsandbytes(mesh: DeviceMesh, kind: str) -> str:
    made = type("AdamW8bit", (torch.optim.SGD,), {"__module__": "bitsandbytes.optim.adamw"})
    model = cp.parallelize(build_model("tiny"), mesh, sharding_of(mesh), data_parallel=kind)  # type: ignore[arg-type]
    optimizer: Any = made(model.parameters(), lr=0.1)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_kernels_that_take_no_shards_are_refused_for_shards(pair: Pool, kind: str) -> None:
    for said in pair.run(2, of_bitsandbytes, kind):
        assert said.startswith(
            "cp_rewrite: AdamW8bit of bitsandbytes takes no sharded weights" if kind == "fsdp" else ""
        )
        assert kind == "fsdp" or not said


def follow_the_page_of_dora() -> None:
    (code,) = [block.code for block in blocks_of("docs/reference/integrations.md") if "dora" in block.code]
    exec(code, {})


def tune_as_rank(mesh: DeviceMesh, folder: Path, options: dict[str, Any], adapters: dict[str, Any]) -> Run:
    follow_the_page_of_dora()
    return tune(mesh, folder, options, None, adapters)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, FSDP], ids=["ddp", "fsdp"])
@pytest.mark.parametrize("adapters", [{"use_dora": True}, {"use_rslora": True}], ids=["dora", "rslora"])
def test_adapters_of_peft_equal_one_process(
    pair: Pool, tmp_path: Path, options: dict[str, Any], adapters: dict[str, Any]
) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed")
    expected = tune(None, tmp_path / "one", {"packing": True}, None, adapters)
    for found in pair.run(2, tune_as_rank, tmp_path / "two", {"packing": True, **options}, adapters):
        compare(expected, found)


@pytest.mark.slow
@pytest.mark.skipif(OLD, reason="torch 2.11 traces DoRA")
@pytest.mark.parametrize(
    ("name", "adapters", "words"),
    [
        ("llama", {"target_modules": ["q_proj"], "use_dora": True}, "integrations.md#dora"),
        ("qwen3_moe", {"target_modules": "all-linear"}, "modules_to_save=['gate']"),
    ],
    ids=["dora", "parameters"],
)
def test_adapters_that_can_not_be_traced_are_errors_that_say_what_to_do(
    name: str, adapters: dict[str, Any], words: str
) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch._dynamo.reset()
    model: Any = peft.get_peft_model(build_model(name), peft.LoraConfig(r=2, **adapters))
    sharding = cp.Sharding(2, {"input_ids": 1, "position_ids": 1, "labels": 1}, cp.PositionIds("position_ids"))
    with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
        cp.explain(model.get_base_model(), sharding)(**make_batch([[13, 8]]))
    assert any(words in note for note in raised.value.__notes__)
