"""The annotation, `Sharding`: which arguments carry tokens, how rows are packed, and how attention over them is shared
out.

Its choices by name and the checks of its arguments (`check_choices`, `checked_masks`, `check_mesh`) stand before it;
behind it the device and the group that an annotation means.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .arguments import HashableDict, checked_dims, checked_ops, flag, whole_number
from .capacity import Capacity
from .masks import PackedMask
from .packing import (
    DocumentIds,
    EndOfDocument,
    Packing,
    PositionIds,
    Spans,
    StartOfDocument,
    Tree,
    check_packing,
    check_spans,
)
from .planning.cost.devices import DEVICES, Device, Model, SiteKind
from .planning.cost.states import StateLayers
from .planning.layouts.options import LayoutOptions
from .planning.names import LAYOUTS, ExchangeName, Layout, part_of
from .torch_internals import grid_groups, whole_mesh_group

if TYPE_CHECKING:  # batch/ imports this file
    from .batch.ahead import Batches
    from .batch.shard import LocalBatch


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

GRAPH_FIELDS = (
    "tokens", "packing", "exchange", "kernel", "exchange_at", "keep_kv", "ranks_per_node", "speeds", "capacity",
    "deterministic", "inner", "tile", "keep_outputs", "strict", "resolve", "random", "assume_mask", "across_documents",
    "reset_states", "spans", "masks", "local_ops", "verify", "max_logits", "block_tokens",
)  # fmt: skip
"""Fields of an annotation that compiled graphs depend on, beside the mesh: another value compiles anew. All others only
decide how batches are read and planned."""


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


@dataclass(frozen=True)
class Sharding:
    """How a batch of packed rows is shared out over a context-parallel group.

    What is cut:
        mesh: one-dimensional DeviceMesh of the context-parallel group, or a plain world size for a dry run (`explain`,
            `plan`) with no process group. Under `a2a+…` heads are scattered over the last of two dims (the ranks with
            the fastest links), keys travel over the first; with one dim over several nodes, inside and between these.
        tokens: argument name -> its token dim; these arguments are cut. All have T tokens there.
        packing: which argument tells documents apart: CuSeqlens, PositionIds, DocumentIds, EndOfDocument,
            StartOfDocument, Tree or PaddingMask; or WholeRows.
        rows: `same`: every rank of the group gives `shard` the same batch. `own`: each gives rows of its own, as many
            and as long as it has; all of them, one behind another in the order of ranks, are one packed row, whose
            documents are spread over all ranks.
    Layout:
        layout: which rank owns which tokens: `contiguous`, `head_tail`, `dual_chunk` or `balanced`.
        balance_for: the mask whose work `balanced` balances: name it for models whose attention mostly is not causal
            over whole documents (windows, bidirectional). None: `assume_mask`, else causal, with the annotation's spans
            or trees.
        chunk_size: documents are cut only at multiples of it, in tokens from the document's start. They must start at
            multiples of it, and `balanced` must get by with the rows that equal tokens per rank need: see `plan`.
        pad_to_multiple: tokens per rank are rounded up to a multiple of it, with rows of no token at the end.
        heads, head_dim: (query, key/value) heads of the model and their size, for which `balanced` weighs work
            against rows that travel. With fewer query heads for each key/value head rows weigh more. None: the
            model's, in batches that are planned after its graph was compiled; before, and with a capacity, 64 and 8
            of 128.
        states: layers of a hybrid that pass a state through tokens, beside each layer of attention, which `balanced`
            weighs, too. The results are the same without.
    Exchange:
        exchange: how keys and values travel: `all_gather`, `needed`, `p2p` (a ring), `a2a` (tokens gathered, heads
            scattered), `a2a+all_gather`, `a2a+needed`, `a2a+p2p`; or `auto`, the cheapest of them by the cost model.
            With fewer key heads than ranks of a node it may scatter heads over some of these (`a2a:2+needed`).
        exchange_at: which rows travel: `attention`, keys and values; `narrowest`, the narrowest tensors that keys and
            values are computed from token by token (MLA's latents), from which each rank computes them again; `auto`,
            whichever is predicted to take less time.
        keep_kv: keep the exchanged keys and values for the backward instead of exchanging them again.
        ranks_per_node: ranks of the group that share a machine: `balanced` keeps documents inside one where it can.
            None: `LOCAL_WORLD_SIZE` under `torchrun`, else the whole group.
        speeds: of the device and its links, for predicted times: `h200`, `h100`, `a100`, `cpu`, a file that
            `python -m cp_rewrite calibrate` wrote, or a Device. None: `exchange="auto"` goes by the GPU's name, and
            `balanced` plans for an H200.
        capacity: the most that a batch may need. Tensors then have fixed sizes and addresses, and a CUDA graph of a
            step replays on other documents: see `cp_rewrite.capacity`.
    Kernel:
        kernel: which attention kernel runs; one named never falls back. `fa3+fa4` is the forward of the one and the
            backward of the other. `auto` takes the first that can, such a pair where it was measured to be faster.
        deterministic: bitwise repeatable backward kernels.
        inner: the compiler that gets the rewritten graph.
    Memory:
        tile: how many of a rank's rows wide parts of the graph that treat tokens alone take at a time, above all the
            head with its loss, so that no tensor has all rows and the whole vocabulary. `auto`: as many as give a
            tile's widest tensor 2 GiB. None: only loops over chunks of tokens
            that the model has itself, in as many tiles as they have chunks.
        keep_outputs: with `tile`, keep what a model returns beside its loss and is as wide, its logits. False: they
            come back as stand-ins, tensors without memory that are computed at the first access (with FSDP before the
            backward) and that no gradient comes back from: see docs/guides/memory.md.
    Safety:
        strict: raise RewriteRefused where a site can't be proven right. False leaves such a graph as it is,
            with a warning: its attention then sees the shard only.
        resolve: where a model uses a sum over tokens as the whole (means, router statistics), add the ranks' parts up;
            `explain` shows where. False refuses such models.
        random: `per_rank` lets each rank draw the random numbers of its own tokens, as for dropout. Give each rank
            another seed. The numbers differ from those of one process, their distribution does not. Random numbers that
            all tokens share (dropout of weights) stay refused.
        assume_mask: your word for a mask that the graph does not show (a mask passed in as a tensor).
        across_documents: True says that attention without a mask of documents is meant to see whole rows. False
            refuses it in batches that have several documents in a row.
        reset_states: recurrent states, and convolutions over tokens, begin anew at each document, whatever the model
            passes. False: as the model computes on one process, which may hand a state on to the next document.
        spans: which argument says what tokens see each other in both directions, for masks that let them.
        masks: arguments that are masks of whole rows, (T, T), (B, T, T), (B, H, T, T) or a BlockMask -> what they mean;
            None: it is no mask. Other arguments that look like masks mean `assume_mask`, or causal attention inside
            documents. `shard` compares masks with every batch's documents.
        local_ops: names of ops (`"my::op"`) that, you vouch, treat each token alone (`check_op` tells). The first call
            of a graph tries each once, on two parts of up to 256 tokens, and raises where it does not.
        verify: `first_step` compares the rebuilt mask with the model's own mask on the first batch. A mask given by
            `assume_mask` is always compared with the tensor that comes in, and flex_attention's lists of blocks with
            its mask function. `every_step` does all of it on each batch.
        check_batches: compare every batch's documents and token order over the group, from host to host, and raise on
            every rank where they differ. False saves some tenths of a millisecond per batch, and does not try
            `local_ops`.
    Watched:
        max_logits: note the largest logit of each head, for `cp.max_logits`: True in every batch, n in every n-th. A
            batch in which they are noted takes one more pass over queries and keys.
    Blocks:
        block_tokens: for models whose blocks are compiled one by one: arguments of a block (`hidden_states`,
            `position_embeddings[0]`) -> token dim. They are no part of a batch; outside the blocks nothing is proven.
            Blocks must get their mask as a tensor, on every rank, and `assume_mask` says what it means.

    Raises:
        TypeError, ValueError: a value that fits no choice; the message names the argument and the choices.
    """

    # What is cut, and how: by position, too
    mesh: DeviceMesh | int
    tokens: Mapping[str, int]
    packing: Packing
    layout: Layout = "balanced"
    exchange: ExchangeName = "auto"
    kernel: Kernel = "auto"
    _: KW_ONLY
    rows: Rows = "same"
    # Layout: which rank owns which tokens
    balance_for: PackedMask | None = None
    chunk_size: int = 1
    pad_to_multiple: int = 1
    heads: tuple[int, int] | None = None
    head_dim: int | None = None
    states: StateLayers | None = None
    # Exchange: how keys and values come to the queries, and what that takes
    exchange_at: ExchangeAt = "auto"
    keep_kv: bool = False
    ranks_per_node: int | None = None
    speeds: Device | str | None = None
    capacity: Capacity | None = None
    # Kernel: what runs, beside `kernel`
    deterministic: bool = False
    inner: Inner = "inductor"
    # Memory: what a step need not hold at once
    tile: int | Literal["auto"] | None = None
    keep_outputs: bool = False
    # Safety: what is refused, vouched for, and compared while it runs
    strict: bool = True
    resolve: bool = True
    random: Random = "refused"
    assume_mask: PackedMask | None = None
    across_documents: bool = False
    reset_states: bool = False
    spans: Spans | None = None
    masks: Mapping[str, PackedMask | None] = field(default_factory=dict[str, PackedMask | None])
    local_ops: tuple[str, ...] = field(default=())
    verify: Verify = "never"
    check_batches: bool = True
    # Watched: numbers that are noted beside the results
    max_logits: bool | int = False
    # Blocks: models whose blocks are compiled one by one
    block_tokens: Mapping[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        check_mesh(self.mesh, self.exchange)
        checked = {
            "tokens": checked_dims("tokens", self.tokens),
            "block_tokens": checked_dims("block_tokens", self.block_tokens) if self.block_tokens else HashableDict(),
            "local_ops": checked_ops(self.local_ops),
            "masks": checked_masks(self.masks, self.tokens),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        check_packing(self.packing, self.tokens)
        check_spans(self.spans, self.tokens)
        check_choices(vars(self))
        # What is wrong with these raises here, not with the first batch.
        _ = LayoutOptions(self.chunk_size, self.pad_to_multiple, self.ranks_per_node).node_size(self.world_size)
        _ = self.device_speeds
        if self.exchange.startswith("a2a+") and not (isinstance(self.mesh, int) or self.most_inner):
            raise ValueError(
                f"exchange={self.exchange!r} scatters heads over the last of two dims of the mesh, or inside of the "
                "nodes of one: give a mesh of two dims, or ranks_per_node"
            )
        named = Model.of((1, 1) if self.heads is None else self.heads, 1 if self.head_dim is None else self.head_dim)
        object.__setattr__(self, "heads", None if self.heads is None else named.heads)

    @property
    def graph_key(self) -> tuple[object, ...]:
        """All that a compiled graph depends on: the mesh and `GRAPH_FIELDS`."""
        return (self.mesh, *self.graph_options.values())

    @property
    def graph_options(self) -> dict[str, object]:
        """`graph_key` by name, without the mesh."""
        options: dict[str, object] = {name: getattr(self, name) for name in GRAPH_FIELDS}
        return options | {"speeds": self.device_speeds}

    @property
    def world_size(self) -> int:
        """Ranks in the context-parallel group."""
        return self.mesh if isinstance(self.mesh, int) else self.mesh.size()

    @cached_property
    def device_speeds(self) -> Device | None:
        """`speeds`, looked up or read from its file, once."""
        speeds: Any = self.speeds
        if speeds is None or isinstance(speeds, Device):
            return speeds
        if not isinstance(speeds, str):
            raise TypeError(f"speeds must be a device's name, a file made by `calibrate` or None, got {speeds!r}")
        try:
            return Device.named(speeds)
        except ValueError as error:
            raise ValueError(f"speeds: {error}") from error

    @property
    def balanced_mask(self) -> PackedMask:
        """The mask whose work `balanced` balances."""
        usual = PackedMask(
            spans=self.spans is not None and not isinstance(self.packing, Tree), tree=isinstance(self.packing, Tree)
        )
        return self.balance_for or self.assume_mask or usual

    def layout_options(self, site: SiteKind | None = None) -> LayoutOptions:
        """Where a batch's documents may be cut, and what its plan is made for: attention as it runs at `site`, but for
        the sizes that the annotation names. None: that is not known. It does not count with a capacity: batches need as
        much in every step."""
        speeds = self.device_speeds or DEVICES["h200"]
        if self.capacity is not None:
            site = SiteKind(Model(), "needed")  # heads don't go with a capacity
        site = site or SiteKind(Model(), self.exchange)
        model, exchange = site.model, site.exchange
        model = replace(model, heads=self.heads or model.heads, head_dim=self.head_dim or model.head_dim)
        return LayoutOptions(
            self.chunk_size, self.pad_to_multiple, self.node_size, speeds, model, exchange, self.states
        )

    @property
    def node_size(self) -> int | None:
        """Ranks of the group that share a machine; None: all, or not the same number on every machine."""
        if self.ranks_per_node is not None or isinstance(self.mesh, int):
            return self.ranks_per_node
        per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        if not per_machine:
            return None
        machines = (self.mesh.mesh.flatten() // per_machine).unique(return_counts=True)[1].tolist()
        return machines[0] if len(machines) > 1 and len(set(machines)) == 1 else None

    @property
    def rank(self) -> int:
        """This process's rank in the group; 0 in a dry run."""
        return 0 if isinstance(self.mesh, int) else dist.get_rank(self.group)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the context-parallel ranks."""
        if isinstance(self.mesh, int):
            raise ValueError(
                "this Sharding was made with a plain world size, for dry runs only: pass a DeviceMesh to run"
            )
        if not dist.is_initialized():
            raise RuntimeError("the process group of the sharding's mesh is gone: destroy_process_group() comes last")
        if self.mesh.ndim == 1:
            return self.mesh.get_group()
        return whole_mesh_group(self.mesh)

    @property
    def most_inner(self) -> int:
        """Ranks over which `a2a+…` scatters heads: of the last of two dims, or of a node; 0: there is one node."""
        if not isinstance(self.mesh, int) and self.mesh.ndim == 2:
            return self.mesh.size(1)
        size = self.node_size or 0
        return size if 1 < size < self.world_size else 0

    def grid_size(self, exchange: str) -> tuple[int, int]:
        """(outer, inner) ranks: heads are scattered over the inner ones under `a2a`, which are all, and under
        `a2a+…`."""
        inner = self.world_size if exchange == "a2a" else part_of(exchange) or self.most_inner
        return self.world_size // inner, inner

    def grid_groups(self, exchange: str) -> tuple[str, str]:
        """Names of the groups of `grid_size`. Those inside and between nodes of a mesh of one dim are made when they
        are first asked for, by all ranks of the group together."""
        if exchange == "a2a" or isinstance(self.mesh, int):
            return "", self.group_name
        if self.mesh.ndim == 2:
            outer, inner = (self.mesh.get_group(dim) for dim in range(2))
        else:
            outer, inner = grid_groups(self.group, self.grid_size(exchange)[1])
        return outer.group_name, inner.group_name

    @property
    def group_name(self) -> str:
        """The group's name as graphs carry it."""
        return "cp" if isinstance(self.mesh, int) else self.group.group_name

    def shard(
        self,
        batch: Mapping[str, Any],
        *,
        lengths: Sequence[int] | Sequence[Sequence[int]] | None = None,
        shift_labels: bool = False,
        label_arg: str = "labels",
        drop: Sequence[str] = (),
        fill: Mapping[str, float] | None = None,
    ) -> AbstractContextManager[LocalBatch]:
        """Cut a global batch: `with sharding.shard(batch) as local: model(**local)`. See `cp_rewrite.batch.shard`."""
        from cp_rewrite.batch.notes import Block  # batch/ imports this file
        from cp_rewrite.batch.shard import shard

        how: Any = {
            "lengths": lengths,
            "shift_labels": shift_labels,
            "label_arg": label_arg,
            "drop": drop,
            "fill": fill,
        }
        return Block(shard(self, batch, **how))

    def batches(
        self,
        loader: Iterable[Mapping[str, Any]],
        *,
        ahead: int = 2,
        shift_labels: bool = False,
        label_arg: str = "labels",
        drop: Sequence[str] = (),
        fill: Mapping[str, float] | None = None,
    ) -> Batches:
        """The loader's batches, each as the block of `shard`, planned by a thread while others train.

            for block in sharding.batches(loader, shift_labels=True):
                with block as local:
                    loss = model(**local).loss
                loss.backward()

        The thread takes up to `ahead` + 1 batches more than are trained on. Ranks compare batches in the loop, as
        without it: the loader gives the same batches on the ranks of a group, and new tensors each time.

        Args:
            loader: gives global batches: a DataLoader, a StatefulDataLoader, a data set, a list.
            ahead: batches that wait, planned, at most.
            shift_labels, label_arg, drop, fill: as of `shard`.
        Returns:
            What can be iterated over, with `len` where the loader has one. With a StatefulDataLoader its
            `state_dict()` is that of the batch that was taken last, and `load_state_dict` resumes there.
        Raises:
            TypeError, ValueError: `ahead` is no whole number or below 1. The loader's errors come out of the loop, a
            batch's out of its block: also a RuntimeError where a batch was written to after it was planned.
        """
        from .batch.ahead import Batches  # batch/ imports this file

        how: dict[str, Any] = {
            "shift_labels": shift_labels,
            "label_arg": label_arg,
            "drop": drop,
            "fill": fill,
        }
        return Batches(self, loader, ahead, how)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """Tokens of all ranks in the order of the global row, differentiably. See `cp_rewrite.batch.tokens`."""
        from .batch.tokens import unshard  # batch/ imports this file

        return unshard(self, x, dim)

    def whole(self, value: Tensor) -> Tensor:
        """The value that one process has, of a loss or another sum over tokens that the compiled model returned.

            with sharding.shard(batch) as local:
                loss = sharding.whole(model(**local).loss)   # or model(**local), as it was returned
            loss.backward()                                  # as without it

        A part of a sum, as of a summed loss, is added up over the ranks; what is whole already, as a mean loss or what
        `parallelize`'s model returns, stays as it is. No host waits for the device. The gradient is what it was: this
        rank's part, for `sum_gradients`.

        Returns:
            A tensor of the same shape and dtype, the same on every rank.
        Raises:
            TypeError, ValueError: no tensor; values of tokens; what was computed from outputs outside of the model,
                which may be a part or the whole.
        """
        from .batch.gradients import whole  # batch/ imports this file

        return whole(value, self)


def require_sharding(value: Any) -> Sharding:
    """`value`, if it is an annotation; a TypeError otherwise."""
    if not isinstance(value, Sharding):
        raise TypeError(f"sharding must be a cp_rewrite.Sharding, got {value!r}")
    return value


def device_of(sharding: Sharding) -> torch.device:
    """Where the group's tensors live: this process's current device of the mesh's type."""
    kind = "cpu" if isinstance(sharding.mesh, int) else sharding.mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def group_of(sharding: Sharding) -> str:
    """The group that sums run over; "" for one rank."""
    return sharding.group_name if sharding.world_size > 1 else ""


def speeds_of(device: torch.device) -> Device:
    """The speeds of a device that its name tells."""
    return Device.like(torch.cuda.get_device_name(device) if device.type == "cuda" else None)
