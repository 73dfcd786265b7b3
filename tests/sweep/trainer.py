"""Compares calls as our Trainer makes them with calls by the caller's batch: loss and all gradients, on one process."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cp_rewrite as cp
from cp_rewrite.integrations.forward import GlobalForward, Switch
from cp_rewrite.refusal import RewriteRefused
from tests.helpers import images

from .cases import IMAGES, SPANS, Case, Wrapped, batch_of, build
from .trial import Outcome, Trial, step

KINDS = ("packed", "whole", "padded")
"""Documents by their positions; rows without positions; the same, the second row's tail left out by a mask."""
WORST = ("different", "crashed", "hung", "refused", "right", "unbuilt", "")
PAD, SHOWN = 0, 50
AUXILIARY = 0.3  # weight of the loss of how evenly experts are chosen: it takes in all tokens


class Plain(GlobalForward):
    """Calls the model as it is with what a rank of one gets, and returns what it returns."""

    def compile(self, call: Callable[..., Any], sharding: cp.Sharding, loss_only: bool) -> Callable[..., Any]:
        return call

    def joined(self, outputs: Any, sharding: cp.Sharding) -> Any:
        return outputs


class TrainerTrial(Trial):
    """A class with each kind of batch that it takes. The outcome's verdict is the worst of them: "different",
    "crashed", "refused" (our own error says why), "right"; "unbuilt" where the plain model takes none of them."""

    ranks = 1
    kind = ""

    @staticmethod
    def next_try(case: Case, outcome: Outcome) -> list[Case]:
        return []

    def run(self) -> Outcome:
        found = {kind: self.tried(kind) for kind in KINDS}
        worst = min(found.values(), key=lambda outcome: WORST.index(outcome.verdict))
        why = [f"{kind}: {text}" for kind, outcome in found.items() for text in outcome.why]
        return replace(worst, why=why, batches={kind: outcome.verdict for kind, outcome in found.items()})

    def tried(self, kind: str) -> Outcome:
        """The outcome of one kind of batch; its verdict is empty where the class takes none such."""
        self.kind, self.outcome = kind, Outcome(self.case.name, self.case.head, own_loss=self.case.own_loss)
        self.stage(kind)
        try:
            model, whole = build(self.case), self.whole_batch()
            if not takes(model, kind):
                return self.outcome
            loss, grads = self.seeded_step(model, whole)
            with contextlib.suppress(AttributeError, RuntimeError, TypeError):  # some lack what they compute it of
                balanced = balance(build(self.case))
                loss, grads = self.seeded_step(balanced, whole)
                model = balanced
        except Exception as error:
            return self.ended("unbuilt", error)
        try:
            total, ours = self.sharded_step(model)
        except Exception as error:
            return self.ended("refused" if is_ours(error) else "crashed", error)
        out = self.compared((loss, total), grads, ours, dict.fromkeys(grads, 0.0))
        return out if out.verdict == "right" else self.in_fp64(model, whole)

    def whole_batch(self) -> dict[str, Tensor]:
        return batch_for(self.case, self.kind)

    def seeded_step(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        torch.manual_seed(0)  # of noise in routers
        return step(model, batch)

    def sharded_step(self, model: nn.Module) -> tuple[float, dict[str, Tensor]]:
        assert isinstance(model, Wrapped)
        Plain(model.model, annotation(self.case), Switch(on=True, loss_only=True)).install()
        try:
            return self.seeded_step(model, self.whole_batch())
        finally:
            del model.model.forward  # the class's is back


def balance(model: Wrapped) -> Wrapped:
    """The model; its experts have their auxiliary loss."""
    for module in model.modules():
        if hasattr(module, "router_aux_loss_coef"):
            module.router_aux_loss_coef = AUXILIARY  # type: ignore[assignment]
    if hasattr(model.model.config, "output_router_logits"):
        model.model.config.output_router_logits = True  # type: ignore[union-attr]
    return model


def takes(model: Wrapped, kind: str) -> bool:
    needed = {"packed": "position_ids", "whole": "input_ids", "padded": "attention_mask"}
    return needed[kind] in model.takes


def annotation(case: Case) -> cp.Sharding:
    """As a user of the Trainer writes it: the same for all kinds of batches."""
    names = {name for name, value in batch_of(case).items() if value.ndim > 1} | {"position_ids"}
    tokens = images.TOKENS if case.name in IMAGES else dict.fromkeys(sorted(names), 1)
    return cp.Sharding(1, tokens, cp.PositionIds("position_ids"), inner="eager", spans=SPANS.get(case.name))


def batch_for(case: Case, kind: str) -> dict[str, Tensor]:
    """A batch of the kind, with the labels of the class's head: one packed row, or two rows of a document each."""
    if case.name in IMAGES and kind != "packed":
        last, pad = (10, 0) if kind == "whole" else (5, 3)
        return images.rows((3, (4, 4), 20), (9, (2, 6), 1, (4, 4), last), pad=pad)
    batch = batch_of(case)
    if kind == "packed":
        return batch
    batch.pop("position_ids", None)
    batch = {name: torch.cat([value, value]) for name, value in batch.items()}
    if kind == "padded":
        shown = torch.ones_like(batch["input_ids"], dtype=torch.bool)
        shown[1, SHOWN:] = False
        batch["input_ids"] = batch["input_ids"].where(shown, PAD)
        if batch["labels"].ndim > 1:
            batch["labels"] = batch["labels"].where(shown, -100)
        elif case.head == "sequence":
            batch["input_ids"][1, SHOWN - 1] = 2  # the end, at which T5 and BART pool
        batch["attention_mask"] = shown.long()
    return batch


def is_ours(error: Exception) -> bool:
    """A refusal, or an error that our own code raises about arguments."""
    if isinstance(error, RewriteRefused):
        return True
    raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return isinstance(error, (ValueError, TypeError)) and raised.is_relative_to(Path(cp.__file__).parent)
