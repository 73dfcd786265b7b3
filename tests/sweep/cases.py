"""Cases of the sweep: classes of `transformers`, the batch that they get, their loss."""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cp_rewrite as cp
from tests.end_to_end.test_end_to_end import make_batch
from tests.helpers import images

from .configs import VOCAB, class_of, small_config

LENGTHS = [[13, 1, 7, 29, 31]]  # 81 tokens: one of two ranks has a row without a token
HEADS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "encoder": "MODEL_MAPPING_NAMES",
    "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
"""Kind of model -> the table of transformers that lists its classes by model type."""


SPANS = {
    "Gemma3ForConditionalGeneration": cp.Spans("token_type_ids", value=1),
    "Gemma4ForConditionalGeneration": cp.Spans("mm_token_type_ids", value=(1, 2)),
    "PaliGemmaForConditionalGeneration": cp.Spans("token_type_ids", value=0, prefix=True),
}
"""Models whose tokens of images, or prefixes, see each other: what marks them. They get tokens, not images. Prefixes of
packed documents would see each other, so that a row is one document there."""


IMAGES = {f"{kind}ForConditionalGeneration": kind for kind in images.KINDS}
"""Models that get images -> their kind."""
DOCUMENTS: list[images.Document] = [(13,), (5, (4, 4), 3, (2, 6), 1), (1,), (7, (8, 8), 2), ((2, 2), 20)]


@dataclass(frozen=True)
class Case:
    """A class of transformers, whether it computes the loss itself, and whether it is in training mode.
    `tile`: as `Sharding` has it."""

    name: str
    head: str
    own_loss: bool = True
    training: bool = True
    tile: int | None = None


class Result(NamedTuple):
    """Output of a model that is tried."""

    loss: Tensor


class Wrapped(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """A model that is given what it takes. Its loss is its own, or computed from what it returns: logits, or hidden
    states by a fixed projection."""

    def __init__(self, model: nn.Module, own_loss: bool) -> None:
        super().__init__()
        self.model, self.own_loss = model, own_loss
        parameters = inspect.signature(type(model).forward).parameters
        self.takes = {name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
        if len(self.takes) < len(parameters):
            self.takes |= {"shift_labels", "num_items_in_batch"}

    def forward(self, **batch: Any) -> Result:
        given = {name: value for name, value in batch.items() if name in self.takes}
        if self.own_loss:
            return Result(self.model(**given).loss)
        targets = batch["shift_labels"] if "shift_labels" in batch else batch["labels"]
        out = self.model(**{name: value for name, value in given.items() if name not in LOSS})
        scores = out.logits if hasattr(out, "logits") else project(out[0])
        count = batch["num_items_in_batch"] if "num_items_in_batch" in batch else (targets != -100).sum()
        return Result(F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum") / count)


LOSS = ("labels", "shift_labels", "num_items_in_batch")


def project(hidden: Tensor) -> Tensor:
    """Hidden states times fixed numbers, (…, 64)."""
    width = hidden.shape[-1]
    rows, columns = torch.arange(width)[:, None] + 1, torch.arange(VOCAB)[None] + 1
    return hidden @ (rows * columns).to(hidden.dtype).sin()


def build(case: Case) -> Wrapped:
    """The case's model, the same weights on every call."""
    if case.name in IMAGES:
        return Wrapped(images.build(IMAGES[case.name]), case.own_loss).train(case.training)
    torch.manual_seed(0)
    kind = class_of(case.name)
    config = small_config(kind.config_class)
    if case.tile and hasattr(config, "vocab_size"):
        config.vocab_size *= 40  # heads are worth a tile then
    if not hasattr(config, "classifier_dropout"):  # heads have 0.1 without it
        config.classifier_dropout = 0.0
    model = kind(config)
    if case.own_loss and getattr(model, "loss_type", "") is None:  # it would warn, which can't be traced
        model.loss_type = "ForCausalLM"
    return Wrapped(model, case.own_loss).train(case.training)


def batch_of(case: Case) -> dict[str, Tensor]:
    """The batch that one process gets."""
    if case.name in IMAGES:
        return images.packed(images.build(IMAGES[case.name]), *DOCUMENTS)
    batch = make_batch(LENGTHS, VOCAB)
    batch["input_ids"] = batch["input_ids"].clamp(min=3)  # no padding, no end
    takes = inspect.signature(class_of(case.name).forward).parameters
    if "decoder_input_ids" in takes:
        batch["decoder_input_ids"] = batch["input_ids"].roll(1, 1)
    if case.head == "sequence":
        batch["labels"] = torch.ones(1, dtype=torch.long)
        batch["input_ids"][:, -1] = 2  # the end, at which T5 and BART pool
    if case.name in SPANS:
        whole, spans = SPANS[case.name].prefix, SPANS[case.name]
        position = torch.arange(sum(LENGTHS[0]))[None] if whole else batch["position_ids"]
        inside = position < 30 if whole else (position % 12 > 1) & (position % 12 < 8)
        batch[spans.arg] = torch.where(inside, spans.values[0], 1 - spans.values[0])
        if len(spans.values) > 1:  # of several types side by side
            batch[spans.arg] += (inside & (position % 12 > 4)).long()
        if whole:
            del batch["position_ids"]
    if case.head == "tokens":
        batch["labels"] = torch.where(batch["labels"] < 0, batch["labels"], batch["labels"] % 2)
    return batch


def sharding_of(case: Case, mesh: Any) -> cp.Sharding:
    if case.name in IMAGES:
        packed = cp.PositionIds("position_ids")
        return cp.Sharding(mesh, images.TOKENS, packed, inner="eager", tile=case.tile)
    tokens = dict.fromkeys([name for name, value in batch_of(case).items() if value.ndim > 1], 1)
    packing = cp.PositionIds("position_ids") if "position_ids" in tokens else cp.WholeRows()
    return cp.Sharding(mesh, tokens, packing, inner="eager", spans=SPANS.get(case.name), across_documents=True,
                       tile=case.tile)  # fmt: skip


def shifts(case: Case) -> bool:
    """True if targets are the next tokens."""
    return case.head in ("causal", "spans", "images")


@functools.cache
def all_cases() -> list[Case]:
    """A case for each class that reads text alone; of model types that have a head, not the model without one."""
    tables: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    found: dict[str, Case] = {}
    types: set[str] = set()
    for head, table in HEADS.items():
        for model_type, names in getattr(tables, table).items():
            name = names if isinstance(names, str) else names[0]
            if head != "encoder" or model_type not in types:
                found.setdefault(name, Case(name, head, own_loss=head != "encoder"))
        types |= {*getattr(tables, table)}
    more = [Case(name, "spans") for name in SPANS] + [Case(name, "images") for name in IMAGES]
    return [*(case for case in found.values() if reads_text(case.name)), *more]


def reads_text(name: str) -> bool:
    """True if a class takes tokens, and its config has no part for anything else."""
    try:
        kind = class_of(name)
        parts: dict[str, Any] = getattr(kind.config_class, "sub_configs", {})
        takes = inspect.signature(kind.forward).parameters
    except (ImportError, AttributeError):  # needs a package that is not installed, or has no config
        return False
    others = ("vision", "audio", "vq", "qformer", "acoustic", "encoder", "image", "projector")
    return "input_ids" in takes and not any(word in part for part in parts for word in others)
