"""A model's forward that takes whole rows and returns what one process would, computed by a whole group. What a trainer
calls it with becomes a batch as `Sharding.shard` takes it: documents are told apart by one argument, or by rows.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

import cp_rewrite as cp
from cp_rewrite.batch.marks import batch_number, is_part, known_part, mark_part, mark_token_dim
from cp_rewrite.batch.tokens import gathered, map_tensors
from cp_rewrite.entry import Backend
from cp_rewrite.experts.choose import ExpertRanks
from cp_rewrite.experts.layers import SharedExperts
from cp_rewrite.packing import Packing, packing_args

from .parallelize import scaled, whole
from .sharded_forward import compile_segments
from .twin import Twin

MASK = "attention_mask"
DERIVED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments that padding-free collators add for other kernels. They say what `position_ids` say."""


class GlobalBatch(NamedTuple):
    """`values` to call the model with, the annotation of this batch, and `lengths`, one list per row, where it is
    padded: what stands behind them is in no document."""

    values: dict[str, Any]
    sharding: cp.Sharding
    lengths: list[list[int]] | None = None


def global_batch(
    values: Mapping[str, Any], sharding: cp.Sharding, *, places: bool, unpads: bool = False
) -> GlobalBatch:
    """A trainer's arguments as `Sharding.shard` takes them. What tells documents apart is on the host.

        position_ids, no mask        documents by them, as the sharding says
        attention_mask               a row is one document, without its padding
        neither                      a row is one document

    Args:
        places: where the model gets no positions, they are tokens' places in the row: positions are made, so that rows
            may be cut in orders of their own.
        unpads: a causal model whose attention takes padding out by the mask's numbers, which can't be traced. What
            stands before padding needs no mask, and the model gets none:

                attention_mask  1 1 1 0 0
                position_ids    0 1 2 0 1    lengths 3
    Raises:
        ValueError: a mask that is no padding at the end of rows, or that the documents contradict; a cache of keys.
    """
    if values.get("past_key_values") is not None:
        raise ValueError(
            "past_key_values came into a step of a trainer: generate() is not sharded, call it outside of steps, as "
            "in a callback; prefixes of PEFT are not supported"
        )
    packing, batch = sharding.packing, {name: value for name, value in values.items() if value is not None}
    kept = {*sharding.tokens, *packing_args(packing)}
    for name in DERIVED:
        if name not in kept:
            batch.pop(name, None)
    lengths = None
    mask = _padding(batch.pop(MASK)) if MASK in batch and MASK not in kept else None
    if not isinstance(packing, cp.PositionIds):
        if mask is not None and not mask.all():
            raise ValueError(f"{MASK} marks padding: let {packing.arg!r}, which tells documents apart, do that")
    elif unpads and mask is not None:
        batch[packing.arg] = _positions(batch, packing.arg, mask)
        if not mask.all():
            lengths = [[count] for count in mask.sum(1).tolist()]
    else:
        if places and packing.arg not in batch:
            batch[packing.arg] = torch.arange(batch["input_ids"].shape[1]).expand(batch["input_ids"].shape)
        if mask is not None or packing.arg not in batch:
            sharding = _by_rows(batch, sharding, mask, values.get(MASK))
    # Trainers have put it on the device. Documents are read on the host; this waits, as the Trainer does in every step.
    named = [name for name in packing_args(sharding.packing) if isinstance(batch.get(name), Tensor)]
    batch |= {name: batch[name].cpu() for name in named}
    return GlobalBatch(batch, sharding, lengths)


def rows_of_choices(
    values: Mapping[str, Any], sharding: cp.Sharding
) -> tuple[Mapping[str, Any], cp.Sharding, int | None]:
    """Arguments whose tokens stand in dim 2, (B, C, T) as models of multiple choice take them, as B·C rows of tokens;
    the annotation of these, and C. Others as they are, and None."""
    if min(sharding.tokens.values()) < 2:
        return values, sharding, None
    tokens = {name: dim - 1 for name, dim in sharding.tokens.items()}
    cut = {name: values[name] for name in (*tokens, MASK) if getattr(values.get(name), "ndim", 0) > 2}
    choices = {value.shape[1] for value in cut.values()}
    if len(choices) != 1:
        raise ValueError(f"tokens stand in dim 2, as of (B, C, T), but there are {sorted(choices)} choices of rows")
    joined = {name: value.flatten(0, 1) for name, value in cut.items()}
    return {**values, **joined}, replace(sharding, tokens=tokens), choices.pop()


def with_choices(call: Callable[..., Any], names: Collection[str], choices: int) -> Callable[..., Any]:
    """Calls a model with the named arguments, B·C rows, as (B, C, T)."""

    def forward(**local: Any) -> Any:
        return call(**{name: x.unflatten(0, (-1, choices)) if name in names else x for name, x in local.items()})

    return forward


def _by_rows(batch: dict[str, Any], sharding: cp.Sharding, mask: Tensor | None, given: Any) -> cp.Sharding:
    """The annotation of a batch whose rows are documents. A mask is put back into the batch, as it was given."""
    arg = sharding.packing.arg
    tokens = {name: dim for name, dim in sharding.tokens.items() if name != arg or name in batch}
    if mask is None:
        return replace(sharding, tokens=tokens, packing=cp.WholeRows())
    _check_positions(batch, arg, mask)
    batch[MASK] = given
    return replace(sharding, tokens={**tokens, MASK: 1}, packing=cp.PaddingMask(MASK))


def _padding(mask: Any) -> Tensor:
    """(B, T) bool on the host, true for tokens that are no padding."""
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise ValueError(
            f"{MASK} must be (B, T), got {tuple(getattr(mask, 'shape', ()))}: leave it out; or, if rows are choices, "
            "(B, C, T), name 2 as the dim of all tokens"
        )
    mask = mask.cpu().bool()
    if not (mask == (torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True))).all():
        raise ValueError(f"{MASK} marks padding before tokens: pad rows at their end, padding_side='right'")
    return mask


def _positions(batch: Mapping[str, Any], arg: str, mask: Tensor) -> Tensor:
    """(B, T) position ids on the host, which begin anew at padding."""
    _check_positions(batch, arg, mask)
    index = torch.arange(mask.shape[1]).expand(mask.shape)
    return torch.where(mask, index, index - mask.sum(1, keepdim=True))


def _check_positions(batch: Mapping[str, Any], arg: str, mask: Tensor) -> None:
    """Raise unless positions, if any, count the tokens of a row from 0 where a mask shows them."""
    if arg in batch and not ((batch[arg].cpu() == torch.arange(mask.shape[1])) | ~mask).all():
        raise ValueError(
            f"{arg!r} start again inside of rows, and transformers ignores that beside an {MASK}: leave the mask out, "
            "as padding-free collators do"
        )


PLACES, KINDS = "position_ids", "mm_token_type_ids"


def with_planes(model: nn.Module, values: Mapping[str, Any], made: GlobalBatch) -> GlobalBatch:
    """Positions in planes of a model that counts tokens of images by time, height and width, where the batch has none.
    Such a model makes them of whole rows, by their tokens.

        (3, B, T)    what the model makes
        (4, B, T)    in front of these the places that documents are told apart by

    Raises:
        ValueError: images, and nothing says which tokens are theirs.
    """
    owner: Any = next((module for module in model.modules() if hasattr(module, "get_rope_index")), None)
    if owner is None or values.get(PLACES) is not None:
        return made
    ids: Tensor = values["input_ids"]
    given = {name: x.cpu() for name, x in values.items() if isinstance(x, Tensor)}
    planes = torch.arange(ids.shape[1]).expand(3, *ids.shape)
    if any(name.endswith("_grid_thw") for name in given):
        if KINDS not in given:
            raise ValueError(f"the batch has images and no {KINDS}, by which positions are made: processors return it")
        takes = inspect.signature(owner.get_rope_index).parameters
        planes, _ = owner.get_rope_index(**{name: x for name, x in given.items() if name in takes})
    places = made.values.get(PLACES)
    batch = {**made.values, PLACES: planes if places is None else torch.cat([places[None], planes])}
    tokens = {**made.sharding.tokens, PLACES: 2} | ({KINDS: 1} if KINDS in given else {})
    return made._replace(values=batch, sharding=replace(made.sharding, tokens=tokens))


Variant = tuple[Packing, tuple[str, ...], bool, int | None]
"""The packing, the arguments that are cut, whether the loss alone is wanted, and how many choices or None."""


@dataclass
class Switch:
    """State of one trainer's forwards at the moment. Outside of its steps its models are what they were."""

    on: bool = False
    loss_only: bool = False

    @contextmanager
    def set(self, **values: bool) -> Generator[None]:
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)


class GlobalForward:
    """Replaces `model.forward` while `switch.on`: global batch by keyword in, global outputs out, on every rank.

    The loss is that of the whole batch and per-token outputs stand in global order: what a trainer computes from them
    (other losses, metrics) is right as it is. A rank's gradients come from its own tokens, times the size of the group:
    averaged over all ranks, as DDP and FSDP do, they are those of one process.

    `twin`: what is traced in the model's place, where FSDP will shard its weights; `blocks`: the modules whose weights
    it gathers together, once it has. `shared`: layers whose experts ranks will share.
    """

    def __init__(
        self,
        model: nn.Module,
        sharding: cp.Sharding,
        switch: Switch,
        twin: Twin | None = None,
        shared: SharedExperts | None = None,
    ) -> None:
        self.model, self.sharding, self.switch, self.twin, self.shared = model, sharding, switch, twin, shared
        self.blocks: tuple[nn.Module, ...] = ()
        self.plain: Callable[..., Any] = model.forward
        for traced in [model] if twin is None else [model, twin.module]:
            name_loss(traced)
        self.shifts = shifts_labels(model)
        self.places = self.shifts and not counts_tokens(model)
        self._variants: dict[Variant, tuple[cp.Sharding, Callable[..., Any]]] = {}

    def install(self) -> None:
        """Put this into the model's place for `forward`, under the same signature."""

        @functools.wraps(self.plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            # Positional arguments have no names to find tokens by: no trainer passes any.
            return self(kwargs) if self.switch.on and not args else self.plain(*args, **kwargs)

        forward._cp_rewrite_forward = self  # type: ignore[attr-defined]
        self.model.forward = forward

    def adopt(self, sharding: cp.Sharding, switch: Switch, experts: ExpertRanks) -> None:
        """Serve another trainer of the same model. experts: how many ranks are to share a set there; `auto`: as many as
        do.

        Raises:
            ValueError: as many do not share one since the first trainer.
        """
        was = 1 if self.shared is None else self.shared.size
        if experts not in (1, "auto", was):
            raise ValueError(
                f"experts={experts}: a trainer before had this model with experts={was}; load it once more"
            )
        if sharding != self.sharding:
            self._variants.clear()
        self.sharding, self.switch = sharding, switch

    def __call__(self, values: Mapping[str, Any]) -> Any:
        values, sharding, choices = rows_of_choices(values, self.sharding)
        unpads = self.places and unpads_rows(self.model) and not balances_experts(self.model, values)
        made = global_batch(values, sharding, places=self.places, unpads=unpads)
        batch, sharding, lengths = with_planes(self.model, values, made)
        dim = sharding.tokens.get("labels", 0)
        labelled = "labels" in batch and batch["labels"].ndim > dim  # or there is one for each row
        sharding, run = self._variant(sharding, labelled, "labels" in batch, choices)
        if labelled and not self.shifts and "num_items_in_batch" not in batch:
            batch["num_items_in_batch"] = (batch["labels"] != -100).sum()
        with sharding.shard(batch, lengths=lengths, shift_labels=labelled and self.shifts) as local:
            outputs = run(**local)
            return self.joined(outputs, sharding)

    def compiled(self, sharding: cp.Sharding, loss_only: bool, choices: int | None) -> Callable[..., Any]:
        """The callable for this rank's tokens: the whole model, in which everything but attention is proven local.
        `loss_only`: nobody reads what it returns beside its loss. choices: so many rows are one to the model."""
        call = self.plain if self.twin is None else self.twin.module.forward
        call = call if choices is None else with_choices(call, sharding.tokens, choices)
        return self.compile(call, sharding, loss_only)

    def compile(self, call: Callable[..., Any], sharding: cp.Sharding, loss_only: bool) -> Callable[..., Any]:
        if self.twin is not None:
            return compile_segments(call, self.twin, self.blocks, sharding, loss_alone=loss_only)
        return torch.compile(call, backend=Backend(sharding, loss_only), fullgraph=True)

    def joined(self, outputs: Any, sharding: cp.Sharding) -> Any:
        """Outputs of this rank's tokens, made global as the proof has it: values per token in order, sums whole. What
        the compiled part did not give is left out."""
        if not isinstance(outputs, Mapping):
            raise TypeError(f"the model returned {type(outputs).__name__}: a ModelOutput or a dict is needed")
        fields: dict[str, Any] = {}
        for name, value in cast(Mapping[str, Any], outputs).items():
            if name == "loss":
                # Each rank's loss is its part: their sum, counted as one; or, of a mean, the whole.
                part = is_part(value) or batch_number(value) is None
                fields[name] = cp.token_mean(value, float(sharding.rank == 0), sharding) if part else value
            elif not (self.switch.loss_only and "loss" in outputs and _is_wide(value, sharding)):
                fields[name] = map_tensors(functools.partial(_made_global, sharding), value)
        fields = {
            name: value for name, value in fields.items() if all(isinstance(x, Tensor) for x in tree_leaves(value))
        }
        return type(outputs)(**map_tensors(lambda value: scaled(value, sharding.world_size), fields))

    def _variant(
        self, sharding: cp.Sharding, labelled: bool, scored: bool, choices: int | None
    ) -> tuple[cp.Sharding, Callable[..., Any]]:
        """The annotation of calls, with labels of tokens or without, and what is compiled. scored: there is a loss."""
        loss_only = scored and self.switch.loss_only
        tokens = {name: dim for name, dim in sharding.tokens.items() if labelled or name != "labels"}
        key = sharding.packing, tuple(tokens), loss_only, choices
        if key not in self._variants:
            sharding = replace(sharding, tokens=tokens)
            self._variants[key] = sharding, self.compiled(sharding, loss_only, choices)
        return self._variants[key]


class FusedForward(GlobalForward):
    """For models whose head TRL replaced (`trl.trainer.utils.add_fused_lm_head`): it returns log-probabilities of the
    labels and no logits.

    The model below the head is compiled, and proven. The head works on each token alone, in kernels of TRL's own, and
    runs as it is, on this rank's tokens.
    """

    def compiled(self, sharding: cp.Sharding, loss_only: bool, choices: int | None) -> Callable[..., Any]:
        backbone: Any = self.model.base_model
        of_backbone = backbone.forward if self.twin is None else cast(Any, self.twin.module).base_model.forward

        # A frame of our own: transformers changes the dict of its arguments, which in the outermost frame reads like a
        # value that outlives the call.
        def inner(**kwargs: Any) -> Any:
            return of_backbone(**kwargs)

        run = self.compile(inner, sharding, loss_only)

        def forward(**local: Any) -> Any:
            with patch.object(backbone, "forward", run):
                return self.plain(**local)

        return forward

    def joined(self, outputs: Any, sharding: cp.Sharding) -> Any:
        if "aux_loss" in outputs:
            raise ValueError("the auxiliary loss of experts mixes tokens: set router_aux_loss_coef=0.0")
        for value in outputs.values():
            if isinstance(value, Tensor) and value.ndim > 1:  # of the head, by token
                mark_part(value, False)
                mark_token_dim(value, 1)
        outputs = super().joined(outputs, sharding)
        if "log_probs" in outputs:
            # One value for each label but a row's first. The labels were shifted before the cut, so that the last token
            # has one too, which is ignored.
            # Copies: an op in place on a view would pass by the hooks that FSDP has on outputs.
            values = {name: value[:, :-1].clone() if value.ndim > 1 else value for name, value in outputs.items()}
            return type(outputs)(**values)
        return outputs


def forward_class_of(model: nn.Module) -> type[GlobalForward]:
    """The class of GlobalForward that takes the place of a model's forward."""
    code = getattr(getattr(model.forward, "__func__", None), "__code__", None)
    return FusedForward if getattr(code, "co_name", "") == "_fused_forward" else GlobalForward


def forward_of(model: nn.Module) -> GlobalForward | None:
    """The GlobalForward that a model has, if any."""
    return getattr(model.forward, "_cp_rewrite_forward", None)


def name_loss(model: nn.Module) -> None:
    """Let a model whose class's name tells no loss, as GPT2LMHeadModel, name the one that `transformers` takes then. It
    would warn at each call, which can't be traced."""
    forward: Any = inspect.unwrap(type(model).forward)
    if getattr(model, "loss_type", "") is None and "loss_function" in forward.__code__.co_names:
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]


def shifts_labels(model: nn.Module) -> bool:
    """True if the model's loss compares a token's scores with the label of the next one, as `transformers` tells."""
    return LOSS_MAPPING.get(cast(str, getattr(model, "loss_type", None))) is ForCausalLMLoss


def unpads_rows(model: nn.Module) -> bool:
    """True if a model is causal and its attention takes a mask apart by its numbers: flash-attn's kernels take padding
    out by it, attention in chunks counts what stands before the tokens."""
    config: Any = getattr(model, "config", None)
    looks_ahead = getattr(config, "is_encoder_decoder", False) or any(
        getattr(module, "is_decoder", True) is False for module in model.modules()
    )
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    return not looks_ahead and (chunked or "flash" in str(getattr(config, "_attn_implementation", "")))


def counts_tokens(model: nn.Module) -> bool:
    """True if a model that gets no positions counts its tokens from `padding_idx` on, as those of RoBERTa's kind do."""
    name = "create_position_ids_from_input_ids"
    kinds = {type(module) for module in model.modules()}
    return any(hasattr(kind, name) or hasattr(sys.modules.get(kind.__module__), name) for kind in kinds)


def _made_global(sharding: cp.Sharding, value: Tensor) -> Any:
    return None if known_part(value) is None else gathered(sharding, whole(value, sharding))


def balances_experts(model: nn.Module, values: Mapping[str, Any]) -> bool:
    """True if a model adds a loss of how evenly its router chooses experts, which leaves padding out by the mask."""
    asked: Any = values.get("output_router_logits")
    return bool(getattr(getattr(model, "config", None), "output_router_logits", False) if asked is None else asked)


def _is_wide(value: Any, sharding: cp.Sharding) -> bool:
    """More than one value per token, as of logits and hidden states: much to put together for nobody."""
    dim = next(iter(sharding.tokens.values()))
    return any(isinstance(leaf, Tensor) and leaf.ndim > dim + 1 for leaf in tree_leaves(value))
