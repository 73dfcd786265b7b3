"""A batch's block, and notes on errors that come out of it: what of the batch, or of the model, may be the reason."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any, NoReturn

from torch import Tensor

from cp_rewrite.packing import packing_args
from cp_rewrite.refusal import BACKWARD_HOOKS, Reason, Refusal, RewriteRefused
from cp_rewrite.sharding import Sharding

from .buffers import OVERWRITTEN
from .labels import COUNT, SHIFTED
from .read_documents import unnamed_tokens

_WRAPPED = {
    ("is incompatible with gradient checkpointing",): "pass use_cache=False: with its default, True, transformers logs "
    "that here, which can't be traced",
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
    ("repeat_interleave", "Runtime assertion failed"): "torch asserts of this rank's tokens what holds of the row's: "
    "give repeat_interleave output_size=ids.shape[1], where it repeats document ids",
    ("Module-level backwards hooks", "Tensor with grad_fn()", ".register_hook("): BACKWARD_HOOKS,
    (
        "HOP: Unsafe side effect",
        "Non-nullified side effect",
    ): "a checkpointed block changes something outside of it "
    "(an attribute, a list), which its second run in the backward would do again: let it return that",
    ("Function.apply: duplicate tensor",): "if that is flash-attn's: give it cu_seqlens.clone() as those of keys",
}
"""What Dynamo says, by versions, where it meets what another part of torch made of the model -> what to do."""
_NOT_SHIFTED = (
    "shift_labels=True is for models that take shift_labels and num_items_in_batch, as those of transformers: leave it "
    "out where the model shifts its labels itself, or the batch holds shifted ones"
)
_SIZES = re.compile(
    r"is out of bounds for dim|exceeds dimension size|ttempting to (expand|broadcast) a dimension|"
    r"must match the (existing )?size|out of range for tensor of size|split_sizes|is invalid for input of size|"
    r"izes of tensors must match|shapes cannot be multiplied|when making fake tensor call|out of range|"
    r"Observed exception"
)
"""What torch says where a number or a tensor of the model is of other sizes than a shard: also of any op, or line of
the model, that fails on the sizes that are traced."""

_FAILED = re.compile(r"got \w+\([\'\"](.+)[\'\"]\)")
"""What an op said that failed on fake tensors."""
_USER_LINE = re.compile(r'File "([^"]+)", line (\d+), in .+\n +(.+)')


class Block(AbstractContextManager[Any]):
    """What `Sharding.shard` returns: to be entered by `with`, once."""

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


@contextmanager
def noted(
    sharding: Sharding, batch: Mapping[str, Any], local: Mapping[str, Any], masks: Collection[str]
) -> Generator[None]:
    """What torch says of shapes and arguments that do not fit, with a note on what of the batch may be the reason."""
    first, dim = next(iter(sharding.tokens.items()))
    try:
        yield
    except TypeError as error:
        unexpected = str(error).partition("unexpected keyword argument ")[2]
        if unexpected in (f"'{SHIFTED}'", f"'{COUNT}'"):
            error.add_note(f"cp_rewrite: {_NOT_SHIFTED}")
        elif unexpected:
            error.add_note(f"cp_rewrite: shard(batch, drop=({unexpected},)) keeps back what the model does not take")
        raise
    except Exception as error:
        if sharding.capacity is not None and "modified by an inplace operation" in str(error):
            error.add_note(f"cp_rewrite: {OVERWRITTEN}")
        asserted = "Runtime assertion failed" in str(error)
        if type(error).__module__.startswith("torch.") or isinstance(error, IndexError) or asserted:
            wrapped = [note for words, note in _WRAPPED.items() if any(said in str(error) for said in words)]
            for note in wrapped:
                error.add_note(f"cp_rewrite: {note}")
            total = batch[first].shape[dim]
            whole = _whole(sharding, local, total)
            for name in whole:
                error.add_note(
                    f"cp_rewrite: local[{name!r}] has the {total} tokens of the whole row, not a rank's: put it into "
                    "the batch before shard, which cuts it"
                )
            if _SIZES.search(str(error)):
                beyond = None if whole or wrapped else _beyond_share(str(error), local[first].shape[dim], total)
                if beyond is not None:
                    raise RewriteRefused([beyond]) from error
                error.add_note(f"cp_rewrite: {_of_shares(local[first].shape[dim], total)}")
            known = {*packing_args(sharding.packing), *masks} - {*sharding.tokens}
            given = {name: value for name, value in batch.items() if name not in known}
            for note in unnamed_tokens(given, sharding.tokens, total):
                error.add_note(f"cp_rewrite: {note}")
        raise


def _whole(sharding: Sharding, local: Mapping[str, Any], total: int) -> list[str]:
    """Arguments of a rank that have the tokens of all."""
    found: list[str] = []
    for name, dim in sharding.tokens.items() if sharding.world_size > 1 else ():
        value: Any = local.get(name)
        if isinstance(value, Tensor) and value.ndim > dim and value.shape[dim] == total:
            found.append(name)
    return found


def _beyond_share(said: str, own: int, total: int) -> Refusal | None:
    """Where torch fails on a place, or a size, that is beyond a rank's `own` tokens but not beyond those of the row."""
    error, _, lines = said.partition("from user code:")
    frames, place = _USER_LINE.findall(lines), re.search(r"index (\d+)", error)
    numbers = [int(place[1]) + 1] if place else [int(n) for n in re.findall(r"(?<![\w.])\d+(?![\w.])", error)]
    numbers += [prod(map(int, sizes.split(", "))) for sizes in re.findall(r"[\[(](\d+(?:, \d+)+)[\])]", error)]
    # Weights that do not fit are the model's mistake, where its width is not made of the tokens' number.
    unfit = re.search("multiplied|reduction dim", error) and "*s" not in error
    if unfit or not frames or not any(own < number <= total for number in numbers):
        return None
    own_lines = [frame for frame in frames if "/torch/" not in frame[0]]
    (file, number, code), failed = (own_lines or frames)[-1], _FAILED.search(error)
    what = failed[1] if failed else error.strip().partition("\n")[0]
    return Refusal(Reason.TOKEN_COUNT, f"{what}: {_of_shares(own, total)}", line=f"{file}:{number}, `{code}`")


def _of_shares(own: int, total: int) -> str:
    return (
        f"torch traces the model on this rank's share of the row's {total} tokens, {own}. Places that stand in the "
        "model as numbers (h[:, 20], h.narrow(1, 10, 8)) must lie in every rank's share: give them as a tensor "
        "(h[:, places]), choose what is written (torch.where(torch.arange(T)[:, None] == 20, new, h)), or make rows "
        "longer. The k of h.topk(k, 1) is at most a rank's share, too. A tensor of the "
        "model's own for all tokens, as a (T, T) mask in a buffer or closure, is cut in forward ([:ids.shape[1]]) if "
        "it is causal or a band, else made in forward or given as an argument"
    )
