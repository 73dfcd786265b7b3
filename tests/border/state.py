"""Where a graph breaks × what is kept from step to step or carried over the break, and what is in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_rewrite.sharding import Inner
from tests.border.model import Batch, Model, cross_entropy, document_mask, keep_tokens, pack
from tests.border.outcome import Case

Write = Callable[[Any, Any], None]
Read = Callable[[Any], Any]

_everyone: dict[str, Any] = {}


@dataclass(frozen=True)
class Place:
    """Where a number outlives the step. `numbers`: it holds a Python float, which `.item()` gives."""

    make: Callable[[Any], None]
    read: Read
    write: Write
    numbers: bool = False


def _attribute(model: Any, x: Any) -> None:
    model.kept = x


def _start(model: Any) -> None:
    model.kept = torch.ones(())


def _append(model: Any, x: Any) -> None:
    model.kept.append(x)


def _key(model: Any, x: Any) -> None:
    model.kept["x"] = x


def _item(model: Any, x: Any) -> None:
    model.kept = x.item()


def _buffer(model: Any) -> None:
    model.register_buffer("kept", torch.ones(()))


def _copy(model: Any, x: Any) -> None:
    model.kept.copy_(x)


def _data(model: Any, x: Any) -> None:
    model.kept.data = x.detach()


def _globally(model: Any, x: Any) -> None:
    _everyone["x"] = x


def _cell(model: Any) -> None:
    """A closure's variable."""
    kept: Any = torch.ones(())

    def read() -> Any:
        return kept

    def write(x: Any) -> None:
        nonlocal kept
        kept = x

    model.read, model.write = read, write


PLACES: dict[str, Place] = {
    "attribute": Place(_start, lambda model: model.kept, _attribute),
    "buffer_assigned": Place(_buffer, lambda model: model.kept, _attribute),
    # Times 1: what the backward needs may not be written over.
    "buffer_written": Place(_buffer, lambda model: model.kept * 1, _copy),
    "buffer_data": Place(_buffer, lambda model: model.kept * 1, _data),
    "list": Place(lambda model: setattr(model, "kept", [torch.ones(())]), lambda model: model.kept[-1], _append),
    "dictionary": Place(
        lambda model: setattr(model, "kept", {"x": torch.ones(())}), lambda model: model.kept["x"], _key
    ),
    "number": Place(lambda model: setattr(model, "kept", 1.0), lambda model: model.kept, _item, numbers=True),
    "global": Place(lambda model: _globally(model, torch.ones(())), lambda model: _everyone["x"], _globally),
    "closure": Place(_cell, lambda model: model.read(), lambda model, x: model.write(x)),
}


@dataclass(frozen=True)
class Value:
    """A value that is kept. `same`: it is the same on all ranks."""

    of: Callable[[Any, Tensor, Batch], Tensor]
    same: bool = False


def _load(model: Model, logits: Tensor, b: Batch) -> Tensor:
    """How many tokens a unit is active for."""
    return ((logits[..., 0] > 0) & (b["labels"] != -100)).sum() / b["num_items"]


def _loss(model: Model, logits: Tensor, b: Batch) -> Tensor:
    return cross_entropy(model, logits, b).detach()


def _targets(model: Model, logits: Tensor, b: Batch) -> Tensor:
    return ((b["labels"] != -100).sum() / b["num_items"]).float()


VALUES: dict[str, Value] = {
    "load": Value(_load),
    "loss": Value(_loss),
    "targets": Value(_targets),
    "items": Value(lambda model, logits, b: b["num_items"] / 10, same=True),
    "weights": Value(lambda model, logits, b: model.head.weight.detach().norm(), same=True),
}


def _no_break() -> None:
    pass


def _printed() -> None:
    print(end="")


BREAKS: dict[str, Callable[[], None]] = {"none": _no_break, "graph_break": torch._dynamo.graph_break, "print": _printed}


def kept(place: str, value: str, stop: str) -> Model:
    """Each step's loss is weighed by what the step before kept."""
    at, of, pause = PLACES[place], VALUES[value], BREAKS[stop]

    def loss(model: Any, logits: Tensor, b: Batch) -> Tensor:
        weight = at.read(model)
        total = cross_entropy(model, logits, b)
        at.write(model, of.of(model, logits, b))
        pause()
        return total * weight

    return Model(loss, extra=at.make)


def carried(place: str, value: str, stop: str) -> Model:
    """Reads a value after the break that was kept before it, in the same step."""
    at, of, pause = PLACES[place], VALUES[value], BREAKS[stop]

    def loss(model: Any, logits: Tensor, b: Batch) -> Tensor:
        at.write(model, of.of(model, logits, b))
        pause()
        first = model.embed(b["input_ids"]).square().mean(-1) * (b["labels"] != -100)
        return first.sum() / b["num_items"] * at.read(model)

    return Model(loss, extra=at.make)


def local(place: str, value: str, stop: str) -> Model:
    """A variable goes over the break: the graph behind it has an input without a name, or a number in it."""
    of, pause, numbers = VALUES[value], BREAKS[stop], PLACES[place].numbers

    def loss(model: Any, logits: Tensor, b: Batch) -> Tensor:
        weight: Any = of.of(model, logits, b)
        weight = weight.item() if numbers else weight
        pause()
        first = model.embed(b["input_ids"]).square().mean(-1) * (b["labels"] != -100)
        return first.sum() / b["num_items"] * weight

    return Model(loss)


def gated(place: str, value: str, stop: str) -> Model:
    """The value that the step before kept moves every token's hidden state."""
    at, of, pause = PLACES[place], VALUES[value], BREAKS[stop]

    def mix(model: Any, h: Tensor, b: Batch) -> Tensor:
        return h * at.read(model)

    def loss(model: Any, logits: Tensor, b: Batch) -> Tensor:
        total = cross_entropy(model, logits, b)
        at.write(model, of.of(model, logits, b))
        pause()
        return total

    return Model(loss, mix, extra=at.make)


def unread(place: str, value: str, stop: str) -> Model:
    """Kept for a log; nothing reads it."""
    at, of, pause = PLACES[place], VALUES[value], BREAKS[stop]

    def loss(model: Any, logits: Tensor, b: Batch) -> Tensor:
        total = cross_entropy(model, logits, b)
        at.write(model, of.of(model, logits, b))
        pause()
        return total

    return Model(loss, keep_tokens, document_mask, at.make)


USES: dict[str, Callable[[str, str, str], Model]] = {f.__name__: f for f in (kept, carried, local, gated, unread)}


def make(use: str, place: str, value: str, stop: str, inner: Inner = "eager") -> Case:
    batches = [pack(), pack((3, 8, 3), seed=2), pack((6, 2, 6), seed=3)]
    whole = stop == "none" and not PLACES[place].numbers
    return Case(lambda: USES[use](place, value, stop), batches, fullgraph=whole, inner=inner)


def names() -> list[tuple[str, str, str, str]]:
    """A third of all: every two parts meet in some."""
    product = itertools.product(*map(enumerate, (USES, PLACES, VALUES, BREAKS)))
    chosen = [tuple(name for _, name in parts) for parts in product if sum(i for i, _ in parts) % 3 == 0]
    return [parts for parts in chosen if parts[0] != "local" or parts[1] in ("attribute", "number")]  # type: ignore[misc]


def is_same(use: str, place: str, value: str, stop: str) -> bool:
    return VALUES[value].same or use == "unread"
