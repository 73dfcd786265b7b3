"""A training loop of one's own on gloo against one process: compiled with a sum of gradients, and by `parallelize`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import varlen

import cp_rewrite as cp
from tests.end_to_end.test_end_to_end import TOKENS, make_batch
from tests.helpers.models import Output, build_model
from tests.helpers.pool import Pool

from .test_parallelize import annotate, gradients, targets, whole

STEPS = [[[13, 1, 7, 12], [5, 3, 9, 16]], [[20, 20], [8, 8, 8, 8]]]
"""Documents of the micro-batches of each step: an even number, as pairs of answers need."""
Batch = dict[str, Tensor]
Result = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Gradients of the first step, before they are clipped; weights after the last."""


@dataclass(frozen=True)
class Case:
    """`loss`: of what the model returned for a batch, cut or whole; None: the model's own."""

    build: Callable[[], nn.Module]
    batch: Callable[[Sequence[int]], Batch] = lambda lengths: make_batch([list(lengths)])
    loss: Callable[[Any, Batch, cp.Sharding | None], Tensor] | None = None
    packing: Any = field(default_factory=lambda: cp.PositionIds("position_ids"))
    autocast: bool = False
    limit: float = 1e-5


class Adapted(nn.Module):
    """A frozen layer and a trained product of two thin ones beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.down = layer.requires_grad_(False), nn.Linear(layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    model: Any = build_model("llama").requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.mlp.up_proj = Adapted(layer.mlp.up_proj)
    return model


def checkpointed() -> nn.Module:
    model: Any = build_model("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def flattened(lengths: Sequence[int]) -> Batch:
    """Rows as transformers' collator makes them of single documents."""
    from transformers import DataCollatorWithFlattening  # slow to import

    batch = make_batch([list(lengths)])
    ids = [part.tolist() for part in batch["input_ids"][0].split(list(lengths))]
    made: Any = DataCollatorWithFlattening()([{"input_ids": part} for part in ids])
    return {name: made[name] for name in TOKENS}


def preference(outputs: Any, batch: Batch, sharding: cp.Sharding | None) -> Tensor:
    """DPO without a reference: documents come in pairs, the first of which is preferred."""
    labels = batch["shift_labels"]
    scores = outputs.logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    scores = scores.masked_fill(labels == -100, 0)
    positions = batch["position_ids"]
    if sharding is not None:
        scores, positions = sharding.unshard(scores, 1), sharding.unshard(positions, 1)
    document = (positions[0] == 0).cumsum(0) - 1
    sums = torch.zeros(int(document[-1]) + 1).index_add(0, document, scores[0])
    return -F.logsigmoid(0.1 * (sums[::2] - sums[1::2])).mean()


class Encoder(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Tokens see their whole document, which `cu_seqlens` tell apart; a label stands where it is foretold."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(64, 32), nn.Linear(32, 96), nn.Linear(32, 64)

    def forward(
        self, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor, num_items_in_batch: Tensor, **_: Any
    ) -> Output:
        index = torch.arange(input_ids.shape[1], device=input_ids.device)
        document = torch.searchsorted(cu_seqlens, index, right=True)
        x = self.embed(input_ids)
        q, k, v = (part.unflatten(-1, (4, 8)) for part in self.qkv(x).chunk(3, -1))
        logits = self.head(x + self.attend(q, k, v, document, cu_seqlens).flatten(2))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch
        return Output(loss, logits)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, document: Tensor, cu_seqlens: Tensor) -> Tensor:
        rows = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*rows, attn_mask=document[:, None] == document[None])
        return out.transpose(1, 2)


class VarlenEncoder(Encoder):  # pyright: ignore[reportUntypedBaseClass]
    """The same by `varlen_attn`, which has no kernel on CPUs: where it is not compiled, the mask stands in for it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, document: Tensor, cu_seqlens: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().attend(q, k, v, document, cu_seqlens)
        most = q.shape[1]
        return varlen.varlen_attn(*(x.flatten(0, 1) for x in (q, k, v)), cu_seqlens, cu_seqlens, most, most)[None]


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return Encoder()


def varlen_encoder() -> nn.Module:
    torch.manual_seed(0)
    return VarlenEncoder()


def with_peft() -> nn.Module:
    peft = importlib.import_module("peft")
    torch.manual_seed(0)
    targets = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    return peft.get_peft_model(build_model("llama"), targets)


def with_sums(lengths: Sequence[int]) -> Batch:
    """The first label of a row is a target, which a shift would lose."""
    batch = make_batch([list(lengths)])
    labels = batch["input_ids"].masked_fill(batch["input_ids"] % 3 > 0, -100)
    labels[:, 0] = 5
    sums = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    return {"input_ids": batch["input_ids"], "labels": labels, "cu_seqlens": sums}


CASES = {
    "accumulation, clipping and checkpointing": Case(checkpointed),
    "autocast": Case(lambda: build_model("llama"), autocast=True, limit=5e-2),
    "adapters": Case(adapted),
    "adapters of PEFT": Case(with_peft),
    "log-probabilities of answers": Case(lambda: build_model("llama"), loss=preference),
    "cu_seqlens": Case(encoder, with_sums, packing=cp.CuSeqlens("cu_seqlens")),
    "varlen encoder": Case(varlen_encoder, with_sums, packing=cp.CuSeqlens("cu_seqlens")),
    "flattening collator": Case(lambda: build_model("llama"), flattened),
}


def shifted(batch: Batch) -> Batch:
    return {**batch, "shift_labels": F.pad(batch["labels"][:, 1:], (0, 1), value=-100)}


def train(model: nn.Module, loss_of: Callable[[Batch, Tensor], Tensor], case: Case, sync: Any = None) -> Result:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    first: dict[str, Tensor] = {}
    for micro_batches in STEPS:
        batches = [case.batch(lengths) for lengths in micro_batches]
        for batch in batches:
            loss_of(batch, targets(batches)).backward()
        if sync is not None:
            cp.sum_gradients(model.parameters(), sync)
        first = first or gradients(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return first, whole(dict(model.named_parameters()))


def amp(case: Case) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext()


def train_alone(name: str) -> Result:
    case = CASES[name]
    model = case.build()

    def loss_of(batch: Batch, count: Tensor) -> Tensor:
        with amp(case):
            outputs = model(**shifted(batch), num_items_in_batch=count)
        return outputs.loss if case.loss is None else case.loss(outputs, shifted(batch), None)

    return train(model, loss_of, case)


def train_as_rank(mesh: DeviceMesh, name: str) -> list[Result]:
    """Compiled; by parallelize."""
    case, results = CASES[name], list[Result]()
    for sharded in (False, True):
        sharding = annotate(mesh, case.packing)
        model = case.build()
        if sharded:
            run: Any = cp.parallelize(model, mesh, sharding)
        else:
            run = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)

        def loss_of(batch: Batch, count: Tensor, run: Any = run, sharding: cp.Sharding = sharding) -> Tensor:
            with sharding.shard({**batch, "num_items_in_batch": count}, shift_labels=True) as local, amp(case):
                outputs = run(**local)
            return outputs.loss if case.loss is None else case.loss(outputs, local, sharding)

        results.append(train(model, loss_of, case, None if sharded else sharding))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_loop_of_ones_own_equals_one_process(pair: Pool, name: str) -> None:
    if "PEFT" in name:
        pytest.importorskip("peft")
    expected = train_alone(name)
    for results in pair.run(2, train_as_rank, name):
        for found in results:
            for theirs, values in zip(found, expected, strict=True):
                assert theirs.keys() == values.keys()
                for key, value in values.items():
                    error = float((theirs[key] - value).norm() / value.norm())
                    assert error <= CASES[name].limit, f"{key}: {error:.1e}"


def test_offsets_of_a_call_are_those_of_the_batch() -> None:
    sharding = cp.Sharding(1, {"input_ids": 1, "labels": 1}, cp.CuSeqlens("cu_seqlens"), inner="eager")
    compiled = torch.compile(encoder(), backend=cp.backend(sharding), fullgraph=True)
    batch = with_sums((13, 1, 7, 12)) | {"num_items_in_batch": torch.tensor(5)}
    with sharding.shard(batch) as local:
        compiled(**{**local, "cu_seqlens": batch["cu_seqlens"].clone()})
        with pytest.raises(ValueError, match="are not those of the batch"):
            compiled(**{**local, "cu_seqlens": torch.tensor([0, 10, 20, 25, 33], dtype=torch.int32)})


def counted_by_shard(mesh: DeviceMesh) -> tuple[float, dict[str, Tensor]]:
    case = CASES["cu_seqlens"]
    sharding, model = annotate(mesh, case.packing), case.build()
    run = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(case.batch((13, 1, 7, 12)), shift_labels=True) as local:
        loss = run(**local).loss
    loss.backward()
    cp.sum_gradients(model.parameters(), sharding)
    torch.distributed.all_reduce(total := loss.detach(), group=sharding.group)
    return float(total), gradients(model)


def test_labels_that_the_model_does_not_shift_are_counted_as_they_are(pair: Pool) -> None:
    case = CASES["cu_seqlens"]
    model, batch = case.build(), case.batch((13, 1, 7, 12))
    loss = model(**batch, num_items_in_batch=(batch["labels"] != -100).sum()).loss
    loss.backward()
    for found, grads in pair.run(2, counted_by_shard):
        assert found == pytest.approx(loss.item(), rel=1e-5)
        for name, value in gradients(model).items():
            assert float((grads[name] - value).norm() / value.norm()) <= 1e-5


class Both(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Adds a loss of shifted labels: one count can't be right for both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, shift_labels: Tensor, num_items_in_batch: Tensor, **batch: Any) -> Output:
        out = self.encoder(num_items_in_batch=num_items_in_batch, **batch)
        shifted = F.cross_entropy(out.logits.flatten(0, 1), shift_labels.flatten(), reduction="sum")
        return Output(out.loss + shifted / num_items_in_batch, out.logits)


def refused_count(mesh: DeviceMesh) -> str:
    case = CASES["cu_seqlens"]
    sharding = annotate(mesh, case.packing)
    run = torch.compile(Both(), backend=cp.backend(sharding), fullgraph=True)
    with (
        sharding.shard(case.batch((13, 1, 7, 12)), shift_labels=True) as local,
        pytest.raises(ValueError, match="counted") as raised,
    ):
        run(**local)
    return str(raised.value)


def test_one_count_for_shifted_and_other_labels_is_refused(pair: Pool) -> None:
    for error in pair.run(2, refused_count):
        assert "reads 'labels' and 'shift_labels', but shift_labels=True counted the shifted" in error
