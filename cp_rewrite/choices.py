"""What an annotation may say: its choices by name, and checks of what it was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from torch.distributed.device_mesh import DeviceMesh

from cp_rewrite.planning.cost.states import StateLayers
from cp_rewrite.planning.names import LAYOUTS, ExchangeName

from .arguments import HashableDict, flag, whole_number
from .capacity import Capacity
from .masks import PackedMask
from .packing import DocumentIds, EndOfDocument, PositionIds, StartOfDocument, Tree

ExchangeAt = Literal["auto", "attention", "narrowest"]
Kernel = Literal["auto", "fa4", "fa3", "fa3+fa4", "aten_flash", "reference"]
Inner = Literal["inductor", "aot_eager", "eager"]
Verify = Literal["never", "first_step", "every_step"]
Random = Literal["refused", "per_rank"]
Rows = Literal["same", "own"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "layout": LAYOUTS,
    "exchange": get_args(ExchangeName),
    "exchange_at": get_args(ExchangeAt),
    "kernel": get_args(Kernel),
    "inner": get_args(Inner),
    "verify": get_args(Verify),
    "random": get_args(Random),
    "rows": get_args(Rows),
}
_OPTIONAL = {"assume_mask": PackedMask, "balance_for": PackedMask, "capacity": Capacity, "states": StateLayers}
_FLAGS = (
    "strict",
    "resolve",
    "keep_kv",
    "keep_outputs",
    "deterministic",
    "check_batches",
    "across_documents",
    "reset_states",
)


def check_choices(fields: Mapping[str, Any]) -> None:
    """Raise a TypeError or ValueError where a field of an annotation, by name, is none of its choices."""
    for name, choices in _CHOICES.items():
        if fields[name] not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}; got {fields[name]!r}")
    for name, kind in _OPTIONAL.items():
        if not isinstance(fields[name], kind | None):
            raise TypeError(f"{name} must be a cp_rewrite.{kind.__name__} or None, got {fields[name]!r}")
    _check_max_logits(fields)
    _check_rows(fields)
    if fields["tile"] not in (None, "auto"):
        whole_number("tile, where it is not 'auto' or None,", fields["tile"])
    for name in _FLAGS:
        flag(name, fields[name])
    if fields["reset_states"] and isinstance(fields["packing"], Tree):
        raise ValueError("reset_states: a state would go from one completion of a tree into the next; pack them apart")


def _check_rows(fields: Mapping[str, Any]) -> None:
    if fields["rows"] == "same":
        return
    if not isinstance(fields["packing"], PositionIds | DocumentIds | EndOfDocument | StartOfDocument):
        raise ValueError(
            "rows='own' are joined to one packed row: its tokens tell documents apart, by PositionIds, DocumentIds, "
            f"EndOfDocument or StartOfDocument, and not by {fields['packing']!r}"
        )
    if fields["across_documents"] or fields["masks"]:
        raise ValueError("rows='own' are joined to one row: across_documents and masks go with rows='same'")


def _check_max_logits(fields: Mapping[str, Any]) -> None:
    every = fields["max_logits"]
    if not isinstance(every, bool):
        whole_number("max_logits, where it is not True or False,", every)
        if fields["capacity"] is not None:
            raise ValueError("with capacity a captured step does the same on every batch: max_logits is True or False")
    if every and fields["block_tokens"]:
        raise ValueError(
            "max_logits can't tell apart the layers of a model whose blocks are compiled one by one (block_tokens)"
        )


def checked_masks(masks: Any, tokens: Mapping[str, int]) -> HashableDict:
    """`masks` of the annotation, whose arguments are not cut."""
    if not isinstance(masks, Mapping):
        raise TypeError(f"masks must map names of arguments to a cp_rewrite.PackedMask or None, got {masks!r}")
    for name, mask in masks.items():
        if not isinstance(mask, PackedMask | None):
            raise TypeError(f"masks[{name!r}] must be a cp_rewrite.PackedMask or None, got {mask!r}")
        if mask is not None and not mask.is_plain:
            raise ValueError(
                f"masks[{name!r}] has chunks, spans or trees: these are read of masks that the model makes"
            )
        if name in tokens:
            raise ValueError(f"masks names {name!r}, which has two token dims and is not cut: leave it out of tokens")
    return HashableDict(masks)


def check_mesh(mesh: Any, exchange: object) -> None:
    if isinstance(mesh, bool) or not isinstance(mesh, int | DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh (mesh['cp']) or a world size for dry runs, got {mesh!r}")
    if isinstance(mesh, int):
        whole_number("mesh as a world size", mesh)
        return
    dims = (1, 2) if exchange == "auto" or str(exchange).startswith("a2a+") else (1,)
    if mesh.ndim not in dims:
        raise ValueError(
            f"mesh must have {' or '.join(map(str, dims))} dim for exchange={exchange!r}, got {mesh.ndim} "
            f"({mesh.mesh_dim_names}): pass the context-parallel part of it, as in mesh['cp']"
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(f"mesh must hold its ranks in ascending order, got {ranks}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh holds ranks {ranks} and not this process, rank {mesh.get_rank()}")
