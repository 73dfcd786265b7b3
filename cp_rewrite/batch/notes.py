"""A batch's block, and notes on errors that come out of it: what of the batch, or of the model, may be the reason."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

from cp_rewrite.packing import packing_args
from cp_rewrite.refusal import ADAPTED_PARAMETER, BACKWARD_HOOKS
from cp_rewrite.sharding import Sharding

from .buffers import OVERWRITTEN
from .labels import COUNT, SHIFTED
from .read_documents import unnamed_tokens

WITHOUT_LIGER = "Inductor fuses norms, SwiGLU and RoPE, and Sharding(tile='auto') makes no logits"
_NOT_SHIFTED = (
    "shift_labels=True is for models that take shift_labels and num_items_in_batch, as those of transformers: leave it "
    "out where the model shifts its labels itself, or the batch holds shifted ones"
)
_WRAPPED = {
    ("is incompatible with gradient checkpointing",): "pass use_cache=False: with its default, True, transformers logs "
    "that here, which can't be traced",
    ("expression Eq(u", "expression Ne(u"): "if that is of tokens picked by a mask that is computed again for each "
    "tensor (`x[y != -100]` beside `y[y != -100]`): compute it once, `keep = y != -100`, and pick all by `keep`, since "
    "torch can't tell that both pick as many",
    (
        "bincount(",
    ): "torch does not know how many counts `torch.bincount` gives. `(ids == torch.arange(n)[:, None]).sum(1)` "
    "are the same of n documents; a mask compares ids themselves",
    ("Could not guard on data-dependent",): "Python decides by what a tensor holds (`.item()`, `if x > 0`), and a rank "
    "has some of the tokens: decide on tensors (`torch.where`), or before the model, on the whole batch. Or the model "
    "has experts of transformers on a CPU, whose backward torch does not compile: experts_implementation='batched_mm'",
    ("of class `Logger`",): "a model is compiled inside of DDP's wrapper, not the wrapper: "
    "cp.parallelize(model, mesh, sharding, data_parallel='ddp') does that",
    ("the function `disable`", "Call to `torch._dynamo.disable()`"): "if blocks of the model are wrapped by "
    "fully_shard: their hooks cut the graph. Let cp.parallelize(model, mesh, sharding) wrap the plain model",
    ("Attempt to trace generator", "_guards_fn", "wrap_with_set_grad_enabled"): "if the module came out of "
    "torch.export: compile the model itself, or export it with dynamic_shapes for the token dims (Dim.AUTO)",
    ("is_fa_with_position_ids", "in flash_attention_mask", "_upad_input"): "if the model runs with flash-attn: "
    "transformers decides there by what tensors hold. Build the model with attn_implementation='sdpa', whose place "
    "flash kernels take all the same; or pass cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k, as "
    "DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes them, and packing=CuSeqlens('cu_seq_lens_q')",
    ("Runtime assertion failed",): "torch asserts of this rank's tokens what holds of the row's: "
    "give repeat_interleave output_size=ids.shape[1], where it repeats document ids",
    ("Module-level backwards hooks", "Tensor with grad_fn()", ".register_hook("): BACKWARD_HOOKS,
    (
        "HOP: Unsafe side effect",
        "Non-nullified side effect",
    ): "a checkpointed block changes something outside of it "
    "(an attribute, a list), which its second run in the backward would do again: let it return that",
    ("FlexAttention does not support backward on CPU",): "torch itself trains flex attention on GPUs alone: on a CPU "
    "try the same model with F.scaled_dot_product_attention and a mask of (T, T); the annotation stays",
    ("in _activate_lora",): ADAPTED_PARAMETER,
    ("peft/tuners/lora/dora.py",): "DoRA's layers clear a cache, and ask for the type of their weight, in each call, "
    "which can't be traced: docs/reference/integrations.md#dora has the two lines to set before",
    ("liger_kernel/",): "Liger's kernels can't be traced into one graph: build the model without them "
    f"(use_liger_kernel=False). {WITHOUT_LIGER}",
    ("Function.apply: duplicate tensor",): "if that is flash-attn's: give it cu_seqlens.clone() as those of keys",
}
"""Dynamo's words, by versions, where it meets what another part of torch made of the model -> what to do."""


class Block(AbstractContextManager[Any]):
    """The block that `Sharding.shard` returns: to be entered by `with`, once."""

    def __init__(self, cut: AbstractContextManager[Any]) -> None:
        self._cut, self._entered = cut, False

    def __enter__(self) -> Any:
        if self._entered:
            raise RuntimeError(
                "this block was entered before: a batch is cut once. Run all steps on it inside of one `with`, or call "
                "sharding.shard(batch) for each; sharding.batches(loader) gives each block once, so a second epoch "
                "iterates over it again"
            )
        self._entered = True
        return self._cut.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._cut.__exit__(*error)

    def keys(self) -> NoReturn:
        """`model(**sharding.shard(batch))` asks for them."""
        raise TypeError("sharding.shard(batch) is a block: `with sharding.shard(batch) as local: model(**local)`")

    def __getitem__(self, name: str) -> NoReturn:
        self.keys()


def warn_if_nothing_ran(sharding: Sharding, ran: bool) -> None:
    """Warn where no rewritten graph ran in a block, though nothing else shows that it was not meant to."""
    if not (ran or isinstance(sharding.mesh, int) or sharding.world_size == 1 or sharding.capacity is not None):
        warnings.warn(
            "no model that cp_rewrite compiled ran inside of this `with sharding.shard(batch)`: a plain model that is "
            "called with a rank's tokens attends to these alone",
            stacklevel=5,
        )


def _untaken(told: str, batch: Collection[str]) -> Generator[str]:
    """Notes on arguments that a model does not take, of an error of Python's (`unexpected keyword argument 'x'`) or of
    Dynamo's (`Unexpected keyword arguments: ['x', 'y']`). `batch`: its arguments' names."""
    found = re.search(r"nexpected keyword arguments?:? (?:\[(.*?)\]|('\w+'))", told)
    names = {} if found is None else dict.fromkeys((found[1] or found[2]).split(", "))
    made = {repr(SHIFTED), repr(COUNT)} & {*names}
    if made:
        yield _NOT_SHIFTED
    if rest := ", ".join(name for name in names if name not in made and name[1:-1] in batch):
        yield f"shard(batch, drop=({rest},)) keeps back what the model does not take"


@contextmanager
def noted(sharding: Sharding, batch: Mapping[str, Any], masks: Collection[str]) -> Generator[None]:
    """Errors of torch about shapes and arguments that do not fit get a note on what of the batch may be the reason."""
    first, dim = next(iter(sharding.tokens.items()))
    try:
        yield
    except Exception as error:
        told = f"{error}\n{error.__cause__}"  # Dynamo says in the cause which arguments do not fit
        for note in _untaken(told, batch):
            error.add_note(f"cp_rewrite: {note}")
        if sharding.capacity is not None and "modified by an inplace operation" in str(error):
            error.add_note(f"cp_rewrite: {OVERWRITTEN}")
        asserted = "Runtime assertion failed" in str(error)
        if type(error).__module__.startswith("torch.") or isinstance(error, IndexError) or asserted:
            for words, note in _WRAPPED.items():
                if any(said in str(error) for said in words):
                    error.add_note(f"cp_rewrite: {note}")
            total = batch[first].shape[dim]
            known = {*packing_args(sharding.packing), *masks} - {*sharding.tokens}
            given = {name: value for name, value in batch.items() if name not in known}
            for note in unnamed_tokens(given, sharding.tokens, total):
                error.add_note(f"cp_rewrite: {note}")
        raise
