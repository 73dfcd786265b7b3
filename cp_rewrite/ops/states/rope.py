"""RoPE whose frequencies hang on the longest position of a batch, as transformers' `dynamic_rope_update` changes them.

    longrope    those of long rows where a position is beyond `original_max_position_embeddings`
    dynamic     those of the longest row since they were last as at first, once a row is longer than the model was made
                for; as at first again in a row that is shorter than that

transformers branches on the largest position, which Dynamo can't trace. Inside of `with sharding.shard(batch)` it
traces choices between tensors in the place of the branches. They are expressions of `torch.max(position_ids)`, which
the passes make that of all ranks, wherever positions come from. What a module keeps is what it keeps in eager calls, so
that either may follow the other. Where these choices are not what the decorator's branches give, those stay.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from types import CellType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from cp_rewrite.torch_internals import comptime, traced_object  # pyright: ignore[reportAttributeAccessIssue]

from .modules import Blocks

_LIBRARY = "transformers.modeling_rope_utils"
Update = Callable[..., None]


def wrap_ropes(module: Any) -> None:
    """Let Dynamo trace choices in what decorates the forwards of a loaded module's classes. Twice is as once."""
    library: Any = sys.modules.get(_LIBRARY)
    names = getattr(module, "__dict__", {})
    if library is None or names.get("dynamic_rope_update") is not library.dynamic_rope_update:
        return
    for kind in [*names.values()]:
        cells = _cells(vars(kind).get("forward")) if isinstance(kind, type) else {}
        plain = {name: cells[name].cell_contents for name in (*_TRACED, "rope_forward") if name in cells}
        if len(plain) < 3 or any(hasattr(function, "_cp_rewrite") for function in plain.values()):
            continue
        if all(_agrees(plain[name].__code__, traced, plain[name]) for name, traced in _TRACED.items()):
            for name, traced in _TRACED.items():
                cells[name].cell_contents = _in_blocks(plain[name], traced)
            forward = plain["rope_forward"]
            if forward.__qualname__ == "PhimoeRotaryEmbedding.forward":
                cells["rope_forward"].cell_contents = _scaled(forward)
            elif "layer_type" in forward.__code__.co_varnames:
                cells["rope_forward"].cell_contents = _held_before(forward)


def _cells(forward: Any) -> dict[str, CellType]:
    """Names that the decorator's function closes over -> their cells; none where a forward is not decorated."""
    while forward is not None:
        code = getattr(forward, "__code__", None)
        if code is not None and forward.__module__ and forward.__globals__.get("__name__") == _LIBRARY:
            return dict(zip(code.co_freevars, forward.__closure__ or (), strict=True))
        forward = getattr(forward, "__wrapped__", None)
    return {}


def _in_blocks(plain: Update, traced: Update) -> Update:
    def update(self: Any, position_ids: Tensor, device: Any, layer_type: str | None = None) -> None:
        inside = torch.compiler.is_compiling() and Blocks.inside
        if inside or f"{_prefix(layer_type)}{_HELD[traced]}" in self._buffers:  # Dynamo would guard on it
            traced(self, position_ids, device, layer_type)
        else:
            plain(self, position_ids, device, layer_type)

    cast(Any, update)._cp_rewrite = True
    return update


def long_or_short(self: Any, position_ids: Tensor, device: Any, layer_type: str | None = None) -> None:
    """Set `inv_freq` to that of long rows or to that of short ones. position_ids: (..., T) integers."""
    comptime(_hold_traced, lambda: _hold(self))
    prefix, T = _prefix(layer_type), torch.max(position_ids) + 1
    limit = _parameters(self, layer_type)["original_max_position_embeddings"]
    long, short = (getattr(self, f"{prefix}{of}_inv_freq").to(device) for of in ("long", "original"))
    setattr(self, f"{prefix}inv_freq", torch.where(T > limit, long, short))


def longest_so_far(self: Any, position_ids: Tensor, device: Any, layer_type: str | None = None) -> None:
    """Set `inv_freq` and the longest row that it is of, `max_seq_len_cached`. position_ids: (..., T) integers."""
    comptime(_hold_traced, lambda: _hold(self))
    prefix, T = _prefix(layer_type), torch.max(position_ids) + 1
    first, longest = self.original_max_seq_len, getattr(self, f"{prefix}max_seq_len_cached")
    longer, _ = sys.modules[_LIBRARY].ROPE_INIT_FUNCTIONS["dynamic"](getattr(self, f"{prefix}numbers"), device, T)
    before, original = getattr(self, f"{prefix}inv_freq"), getattr(self, f"{prefix}original_inv_freq").to(device)
    grows, shrinks = longest < T, (first > T) & (longest > first)
    setattr(self, f"{prefix}inv_freq", torch.where(grows, longer, torch.where(shrinks, original, before)))
    setattr(self, f"{prefix}max_seq_len_cached", torch.where(grows, T, torch.where(shrinks, first, longest)))


_TRACED = {"longrope_frequency_update": long_or_short, "dynamic_frequency_update": longest_so_far}
"""Functions inside of transformers' decorator, and what is traced in their place."""
_HELD = {long_or_short: "long_inv_freq", longest_so_far: "max_seq_len_cached"}
"""Buffers without which they are not run eagerly."""


def _prefix(layer_type: str | None) -> str:
    """What the names of a layer type's attributes begin with."""
    return "" if layer_type is None else f"{layer_type}_"


def _parameters(self: Any, layer_type: str | None) -> dict[str, Any]:
    return self.config.rope_parameters if layer_type is None else self.config.rope_parameters[layer_type]


class _Numbers:
    """The numbers of a config that frequencies are made of. Configs check what they are given, in ways that Dynamo does
    not trace."""

    def __init__(self, config: Any, layer_type: str | None) -> None:
        with suppress(AttributeError, ValueError):
            config = config if layer_type is None else config.per_layer_config[layer_type]
        config.standardize_rope_params()
        own = config.rope_parameters
        self.rope_parameters = dict(own if layer_type is None else own[layer_type])
        for name in ("head_dim", "hidden_size", "num_attention_heads", "max_position_embeddings"):
            if hasattr(config, name):
                setattr(self, name, getattr(config, name))

    def standardize_rope_params(self) -> None:
        """Was done."""


def _hold_traced(context: Any) -> None:
    """Before Dynamo reads a module: what its graph writes would be of another kind at the next call otherwise, and all
    be compiled once more."""
    module = traced_object(context, "self")
    if isinstance(module, torch.nn.Module):
        _hold(module)


def _hold(module: Any) -> None:
    """Let a module keep what hangs on the longest row in buffers, which move with it, and which a twin shares with its
    model; frequencies in fp32, as transformers makes those of longer rows."""
    kinds = module.rope_type if isinstance(module.rope_type, dict) else {None: module.rope_type}
    for layer_type, kind in kinds.items():
        prefix, dynamic = _prefix(layer_type), "dynamic" in kind
        if not dynamic and kind != "longrope":
            continue
        if dynamic and not hasattr(module, f"{prefix}numbers"):
            setattr(module, f"{prefix}numbers", _Numbers(module.config, layer_type))
        name = f"{prefix}{_HELD[longest_so_far if dynamic else long_or_short]}"
        own = vars(module).pop(name, module.original_max_seq_len)
        if name in module._buffers:
            continue
        for of in (f"{prefix}inv_freq", f"{prefix}original_inv_freq"):
            module.register_buffer(of, getattr(module, of).float(), persistent=False)
        device = getattr(module, f"{prefix}inv_freq").device
        held = torch.as_tensor(own, device=device) if dynamic else _long(module, layer_type, device)
        module.register_buffer(name, held, persistent=False)


def _long(module: Any, layer_type: str | None, device: torch.device) -> Tensor:
    numbers = _Numbers(module.config, layer_type)
    T = _parameters(module, layer_type)["original_max_position_embeddings"] + 1
    return sys.modules[_LIBRARY].ROPE_INIT_FUNCTIONS["longrope"](numbers, device, T)[0]


@functools.cache
def _agrees(code: Any, traced: Update, plain: Update) -> bool:
    """True if an update that is traced leaves what the library's leaves, after each of some rows."""
    kind = "longrope" if traced is long_or_short else "dynamic"
    try:
        theirs, ours = _trial(kind), _trial(kind)
        for T in (3, 8, 9, 15, 12, 8, 5, 11):
            positions = torch.arange(T, device="cpu")[None]
            for update, module in ((plain, theirs), (traced, ours)):
                update(module, positions, torch.device("cpu"))
            cached = (int(module.max_seq_len_cached) for module in (theirs, ours))
            if len({*cached}) > 1 or not torch.equal(theirs.inv_freq, ours.inv_freq):
                return False
    except Exception:
        return False
    return True


def _trial(kind: str) -> Any:
    """A module of RoPE that was made for rows of 8 tokens."""
    numbers = {"original_max_position_embeddings": 8, "long_factor": [2.0, 3.0], "short_factor": [1.0, 1.5]}
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 1.0, **numbers}
    sizes = {"head_dim": 4, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 8}
    config = SimpleNamespace(rope_parameters=parameters, standardize_rope_params=lambda: None, **sizes)
    module: Any = torch.nn.Module()
    module.config, module.rope_type = config, kind
    module.max_seq_len_cached = module.original_max_seq_len = 8
    first, _ = sys.modules[_LIBRARY].ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    module.register_buffer("inv_freq", first, persistent=False)
    module.register_buffer("original_inv_freq", first.clone(), persistent=False)
    return module


def _held_before(plain: Any) -> Any:
    """The forward without its decorator, which reads buffers of a layer type: those of another may not be held yet."""

    def forward(self: Any, x: Tensor, position_ids: Tensor, **kwargs: Any) -> Any:
        if kwargs and torch.compiler.is_compiling() and Blocks.inside:
            comptime(_hold_traced)
        return plain(self, x, position_ids, **kwargs)

    return forward


def _scaled(plain: Any) -> Any:
    """PhiMoE's forward, which branches on the longest position itself, for what it multiplies by."""

    def forward(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        parameters = self.config.rope_parameters
        if not (torch.compiler.is_compiling() and Blocks.inside) or parameters["rope_type"] == "default":
            return plain(self, x, position_ids)
        beyond = torch.max(position_ids) + 1 > parameters["original_max_position_embeddings"]
        scale = torch.where(beyond, parameters["long_mscale"], parameters["short_mscale"])
        return plain(_OfScale(self.original_inv_freq.to(x.device), scale), x, position_ids)

    return forward


class _OfScale:
    """In the place of PhiMoE's module: without a branch, it multiplies by what its frequencies come with."""

    def __init__(self, inv_freq: Tensor, scale: Tensor) -> None:
        self.config = _Default()
        self.found = inv_freq, scale

    def rope_init_fn(self, config: Any) -> tuple[Tensor, Tensor]:
        return self.found


class _Default:
    """A config of the kind without a branch."""

    def __init__(self) -> None:
        self.rope_parameters = {"rope_type": "default"}
