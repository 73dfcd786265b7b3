"""Edits of a batch between `shard` and the model count, or are an error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.helpers.packed_model import VOCAB, WIDTH, PackedModel, packed_batch
from tests.helpers.pool import Pool
from tests.helpers.tolerances import relative_error

TOKENS = {
    name: 1 for name in ("input_ids", "position_ids", "doc_ids", "labels", "advantage", "divisor", "given", "other")
}
Edit = Callable[[Any], Any]


class Edited(PackedModel):
    """Reads weights of tokens, divides by others, and adds embeddings that it is given."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, advantage: Tensor, divisor: Tensor, given: Tensor, other: Tensor, scale: Tensor, **b: Any
    ) -> Any:
        h = self.embed(b["input_ids"]) + given
        h = self.attended(h, self.mask(h, b["doc_ids"], b["position_ids"], b["input_ids"]))
        each = F.cross_entropy(self.head(h / divisor[..., None]).flatten(0, 1), b["labels"].flatten(), reduction="none")
        # Of the logarithm at 0 the value is left out of the sum, but its gradient is not a number.
        each = each.view_as(advantage) * advantage + (h.square().sum(-1) * divisor).log()
        return (each * scale.sum()).sum() / b["num_items"]


def edited_batch(tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    batch = packed_batch(1, tokens)
    return {
        **batch,
        "advantage": torch.randn(1, tokens, generator=generator),
        "divisor": torch.rand(1, tokens, generator=generator) + 0.5,
        "given": torch.randn(1, tokens, WIDTH, generator=generator),
        "other": batch["position_ids"] // 3,
        "scale": torch.ones(2),
    }


def noise(b: Any) -> None:
    b["input_ids"].masked_fill_(b["input_ids"] > VOCAB // 2, 3)
    b["advantage"].sub_(0.5)
    b["labels"].masked_fill_(b["labels"] < 4, -100)


def of_gradients(b: Any) -> None:
    b["given"].mul_(2)
    b["given"].requires_grad_()


def made(b: Any) -> None:
    """Tensors of the caller's own, 0 in rows without a token, and -100 nowhere."""
    b["divisor"], b["labels"] = b["divisor"] * 2, b["input_ids"].clone()
    for value in (b["divisor"], b["labels"]):
        torch._dynamo.maybe_mark_dynamic(value, 1)


def untold(b: Any) -> None:
    """Writes that torch does not count."""
    b["advantage"].data.mul_(3)
    b["divisor"].numpy()[:] += 1


COUNT = (noise, of_gradients, made, untold, of_gradients)


def plain_steps(tokens: int) -> list[dict[str, Tensor]]:
    model, found = Edited(), list[dict[str, Tensor]]()
    for edit in COUNT:
        batch = edited_batch(tokens)
        edit(batch)
        model.zero_grad()
        loss = model(**batch)
        loss.backward()
        given = {"given": batch["given"].grad} if batch["given"].grad is not None else {}
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach(), **given, **grads})
    return found


def sharded_steps(mesh: DeviceMesh, tokens: int, fixed: bool, inner: Any) -> list[dict[str, Tensor]]:
    capacity = cp.Capacity(8, 24, 200) if fixed else None
    sharding = cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids"), inner=inner, capacity=capacity)
    torch._dynamo.reset()
    model, found = Edited(), list[dict[str, Tensor]]()
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    for edit in COUNT:
        model.zero_grad()
        with sharding.shard(edited_batch(tokens)) as local:
            edit(local)
            loss = compiled(**local)
        loss.backward()
        cp.sum_gradients(model.parameters(), sharding)
        whole = cp.token_mean(loss.detach(), float(sharding.rank == 0), sharding)
        given = local["given"].grad
        given = {} if given is None else {"given": sharding.unshard(given, 1)}
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": whole, **given, **grads})
    return found


@pytest.mark.parametrize(
    ("tokens", "fixed", "inner"),
    [
        (23, False, "aot_eager"),
        (24, True, "eager"),
        pytest.param(23, False, "inductor", marks=pytest.mark.slow),
    ],
)
def test_edits_inside_of_a_block_count(pool: Pool, tokens: int, fixed: bool, inner: str) -> None:
    for rank in pool.run(2, sharded_steps, tokens, fixed, inner):
        for edit, expected, actual in zip(COUNT, plain_steps(tokens), rank, strict=True):
            assert actual.keys() == expected.keys(), edit
            for name, value in expected.items():
                assert relative_error(actual[name], value) < 1e-4, (edit.__name__, name)


def swapped(b: Any) -> dict[str, Any]:
    return {**b, "doc_ids": b["other"], "other": b["doc_ids"]}


NOT_THE_BATCHS: tuple[Edit, ...] = (
    lambda b: b["doc_ids"].fill_(0),
    lambda b: b["doc_ids"].data.fill_(0),
    lambda b: {**b, "doc_ids": b["other"]},
    swapped,
)
OF_ONE_RANK: tuple[Edit, ...] = (
    lambda b: {**b, "scale": b["divisor"].mean(1)},
    lambda b: {**b, "scale": (b["labels"] != -100).sum()[None].float()},
    lambda b: {**b, "scale": b["scale"].mul_(b["divisor"][0, 0])},
)


def errors_of(mesh: DeviceMesh) -> list[str]:
    """The error, or "", of each call: some that get other tensors than the batch's, between two that do not."""
    sharding = cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids"), inner="eager")
    torch._dynamo.reset()
    compiled = torch.compile(Edited(), backend=cp.backend(sharding), fullgraph=True, dynamic=True)
    found: list[str] = []
    for edit in (lambda _: None, *NOT_THE_BATCHS, *OF_ONE_RANK, lambda _: None):
        with sharding.shard(edited_batch(23)) as local:
            try:
                given = edit(local)
                compiled(**(given if isinstance(given, dict) else local))
                found.append("")
            except (RuntimeError, ValueError) as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


def test_arguments_of_a_call_are_the_batchs_or_the_same_on_all_ranks(pool: Pool) -> None:
    for first, *errors, last in pool.run(2, errors_of):
        assert (first, last) == ("", "")
        for error in errors[: len(NOT_THE_BATCHS)]:
            assert "ValueError: doc_ids of this call are not those of the batch" in error
        for error in errors[len(NOT_THE_BATCHS) :]:
            assert "ranks [1] of the group call the model with other arguments than rank 0" in error
            assert "scale: torch.float32" in error


class Scores(PackedModel):
    """Returns logits: its loss is computed outside."""

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        return logits


OUTSIDE: dict[str, tuple[Callable[[Tensor, Any], Tensor], dict[str, int] | None]] = {
    "targets": (lambda y, b: F.cross_entropy(y.flatten(0, 1), b["targets"].flatten(), reduction="sum"), {}),
    "named": (
        lambda y, b: F.cross_entropy(y.flatten(0, 1), b["targets"].flatten(), reduction="sum"),
        {"targets": -100},
    ),
    "in_place": (lambda y, b: y.div_(3).logsumexp(-1).square().sum(), {"targets": 0}),
}


def outside_on(mesh: DeviceMesh) -> dict[str, Any]:
    tokens = {**dict.fromkeys(("input_ids", "position_ids", "doc_ids", "labels"), 1), "targets": 1}
    sharding = cp.Sharding(mesh, tokens, cp.DocumentIds("doc_ids"), inner="eager")
    torch._dynamo.reset()
    model, found = Scores(), dict[str, Any]()
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    for name, (loss, fill) in OUTSIDE.items():
        batch = packed_batch(1, 23)
        with sharding.shard({**batch, "targets": batch["input_ids"]}, fill=fill) as local:
            targets = {"targets": local.pop("targets")}
            try:
                model.zero_grad()
                loss(compiled(**local), targets).backward()
                cp.sum_gradients(model.parameters(), sharding)
                found[name] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            except ValueError as error:
                found[name] = str(error)
    return found


def test_losses_outside_of_the_model_count_no_fill(pool: Pool) -> None:
    for rank in pool.run(2, outside_on):
        assert "batch['targets'] holds whole numbers, which the model does not read" in rank.pop("targets")
        for name, grads in rank.items():
            model, batch = Scores(), packed_batch(1, 23)
            OUTSIDE[name][0](model(**batch), {"targets": batch["input_ids"]}).backward()
            for key, p in model.named_parameters():
                assert p.grad is None or relative_error(grads[key], p.grad) < 1e-4, (name, key)


def test_fill_names_arguments_with_tokens() -> None:
    sharding = cp.Sharding(2, {"x": 1}, cp.WholeRows())
    for fill, says in (({"y": 0}, "fill names .'y'., which tokens does not"), ({"x": "0"}, "fill.'x'. must be a num")):
        with pytest.raises((KeyError, TypeError), match=says), sharding.shard({"x": torch.ones(1, 7)}, fill=fill):  # type: ignore[arg-type]
            pass
    with sharding.shard({"x": torch.ones(1, 7)}, fill={"x": 9}) as local:
        assert local["x"].shape == (1, 4)


def warnings_of(mesh: DeviceMesh) -> list[list[str]]:
    """Warnings of a block that calls the plain model, and of one that calls the compiled model."""
    sharding = cp.Sharding(mesh, {"x": 1}, cp.WholeRows(), inner="eager")
    torch._dynamo.reset()

    def model(x: Tensor) -> Tensor:
        return (x * x).sum()

    found: list[list[str]] = []
    for call in (model, torch.compile(model, backend=cp.backend(sharding), fullgraph=True)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with sharding.shard({"x": torch.ones(1, 8)}) as local:
                call(**local)
        found.append([f"{note.filename}: {note.message}" for note in caught if "no model" in str(note.message)])
    return found


def test_a_plain_model_called_in_a_block_warns(pool: Pool) -> None:
    for plain, compiled in pool.run(2, warnings_of):
        assert len(plain) == 1
        assert plain[0].startswith(__file__)
        assert not compiled
