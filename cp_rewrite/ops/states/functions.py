"""Code of other libraries that Dynamo traces otherwise inside of a batch's block: recurrences become ops of ours, and
RoPE whose frequencies hang on the longest position becomes choices between tensors.

    wrap_modules                modules of transformers whose own loops pass a state through tokens
    wrap_ropes                  RoPE of transformers
    state_ops                   the block in which all of it is traced so
    OPS, substitute_loaded      functions that pass a state through tokens, and the ops that stand for them

Outside of `with sharding.shard(batch)` Dynamo compiles what is there. Eager calls are never touched. What gives other
numbers than its op, or its choices, is left alone.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_rewrite.torch_internals import (
    MathFunctions,
    comptime,  # pyright: ignore[reportAttributeAccessIssue]
    traced_object,  # pyright: ignore[reportAttributeAccessIssue]
)

from .maps import wide

_ops: Any = torch.ops.cp_rewrite
_NAME = "MiniMaxLightningAttention"


class Blocks:
    """Blocks that are open, in all threads. `inside`: whether there are any; Dynamo guards on it."""

    count = 0
    inside = False


def wrap_modules(module: ModuleType) -> None:
    """Wrap the forwards of a loaded module's classes, once: inside of blocks they are traced as ops of ours.

        MiniMaxLightningAttention      ssd: keys write, queries look, and each head decays by a number of its own

    Dynamo asks no table for the forward of a module, so that it is wrapped in its class; outside of blocks, and in
    eager calls, it runs as it is. As of functions, it is left alone if it gives other numbers than the op.
    """
    names = (_NAME, "MiniMaxConfig", "apply_mask_to_padding_states")
    found: list[Any] = [vars(module).get(name) for name in names]
    if None in found or hasattr(found[0].forward, "_cp_rewrite"):
        return
    kind, config, masked = found
    if _class_agrees(kind, config, masked):
        kind.forward = _wrapped(kind.forward, masked)


def _wrapped(plain: Any, masked: Any) -> Any:
    @functools.wraps(plain)
    def forward(
        self: Any, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None,
        past_key_values: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        if torch.compiler.is_compiling() and Blocks.inside and past_key_values is None:
            return lightning(self, hidden_states, attention_mask, masked), None
        return plain(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)

    wrapped: Any = forward
    wrapped._cp_rewrite = True
    return forward


def lightning(module: Any, hidden_states: Tensor, attention_mask: Tensor | None, masked: Any) -> Tensor:
    """(B, T, C): what the attention gives for hidden states (B, T, C)."""
    rows = masked(module.act_fn(module.qkv_proj(hidden_states)), attention_mask)
    heads = rows.unflatten(-1, (module.num_attention_heads, 3 * module.head_dim))
    query, key, value = heads.split(module.head_dim, 3)
    rate = -module.slope_rate[:, 0, 0]
    out = _ops.ssd(value, torch.ones_like(value[..., 0]), rate, key, query, None).to(value.dtype)
    out = module.norm(out.flatten(2))
    return module.out_proj(F.sigmoid(module.output_gate(hidden_states)) * out)


def _class_agrees(kind: Any, config: Any, masked: Any) -> bool:
    """True if the class gives on a few tokens what the op gives."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            sizes = dict(num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2)
            module = kind(config(hidden_size=8, head_dim=4, block_size=4, **sizes), 0).float()
            x = torch.randn(2, 7, 8, dtype=torch.float32)
            theirs, ours = module(x, None, None)[0], lightning(module, x, None, masked)
    except Exception:
        return False
    return torch.allclose(theirs, ours, rtol=1e-3, atol=1e-4)


_LIBRARY = "transformers.modeling_rope_utils"
Update = Callable[..., None]


def wrap_ropes(module: Any) -> None:
    """Let Dynamo trace choices in what decorates the forwards of a loaded module's classes. Twice is as once.

    transformers' `dynamic_rope_update` changes frequencies by the longest position of a batch:

    longrope    those of long rows where a position is beyond `original_max_position_embeddings`
    dynamic     those of the longest row since they were last as at first, once a row is longer than the model was made
                for; as at first again in a row that is shorter than that

    It branches on the largest position, which Dynamo can't trace. Inside of `with sharding.shard(batch)` Dynamo traces
    choices between tensors in the place of the branches. They are expressions of `torch.max(position_ids)`, which the
    passes make that of all ranks, wherever positions come from. What a module keeps is what it keeps in eager calls, so
    that either may follow the other. Where these choices are not what the decorator's branches give, those stay.
    """
    library: Any = sys.modules.get(_LIBRARY)
    names = getattr(module, "__dict__", {})
    if library is None or names.get("dynamic_rope_update") is not library.dynamic_rope_update:
        return
    for kind in [*names.values()]:
        cells = _cells(vars(kind).get("forward")) if isinstance(kind, type) else {}
        plain = {name: cells[name].cell_contents for name in (*_TRACED, "rope_forward") if name in cells}
        if len(plain) < 3 or any(hasattr(function, "_cp_rewrite") for function in plain.values()):
            continue
        if all(_rope_agrees(plain[name].__code__, traced, plain[name]) for name, traced in _TRACED.items()):
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
    """Prefix of the names of a layer type's attributes."""
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
def _rope_agrees(code: Any, traced: Update, plain: Update) -> bool:
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


_PACKAGES = ("transformers.models.", "transformers_modules.", "fla.ops.", "mamba_ssm.ops.")
_LIBRARIES = ("fla.", "mamba_ssm.", "causal_conv1d.")
_NAMES = {"q": "query", "k": "key", "v": "value", "u": "hidden_states", "x": "hidden_states", "delta": "dt"}
"""Other names of arguments -> those of transformers."""
_SAME = frozenset({"chunk_size", "state_v_first", "use_mambapy", "use_associative_scan"})
"""Arguments that change how a function computes, but not what."""
Given = Mapping[str, Any]
"""Arguments of a call, and defaults, by transformers' names, without those that are None."""


@contextmanager
def state_ops() -> Generator[None]:
    """Inside, Dynamo puts state ops in the place of the functions of all modules that are loaded, and keeps
    functions of the token count."""
    substitute_loaded()
    Blocks.count += 1
    Blocks.inside = MathFunctions.kept = True
    try:
        yield
    finally:
        Blocks.count -= 1
        Blocks.inside = MathFunctions.kept = Blocks.count > 0


def _delta(op: Callable[..., Tensor], given: Given) -> Any:
    query, key, value, g, beta = (given[name] for name in ("query", "key", "value", "g", "beta"))
    if given.get("use_gate_in_kernel"):
        g = _gate(g, given["A_log"], given.get("dt_bias"))
    if given.get("use_beta_sigmoid_in_kernel"):
        beta = beta.to(wide(beta.dtype)).sigmoid() * (2 if given.get("allow_neg_eigval") else 1)
    scale = given.get("scale", query.shape[-1] ** -0.5)
    norm = given.get("use_qk_l2norm_in_kernel", False)
    return op(query, key, value, g, beta, given.get("cu_seqlens"), scale, norm), None


def _gate(g: Tensor, rate: Tensor, bias: Tensor | None) -> Tensor:
    """Decays of raw g (B, T, H) or (B, T, H, K), as fla's kernels make them. rate: (H,), a logarithm. bias: as many as
    decays of a token."""
    g = g.to(wide(g.dtype))
    g = g if bias is None else g + bias.view(g.shape[2:])
    return -rate.to(g.dtype).exp().view(-1, *[1] * (g.ndim - 3)) * F.softplus(g)


def gated_delta_rule(given: Given) -> Any:
    """(rows, None), as `torch_chunk_gated_delta_rule` gives."""
    return _delta(_ops.gated_delta_rule, given)


def kimi_delta(given: Given) -> Any:
    """(rows, None), as `chunk_kimi_delta_attention` gives."""
    return _delta(_ops.kimi_delta, given)


def ssd(given: Given) -> Tensor:
    """Compute `mamba2_chunk_scan`: step sizes, their limits and the skip D are done token by token."""
    x, dt = given["hidden_states"], given["dt"]
    if "dt_bias" in given:
        dt = dt + given["dt_bias"].to(dt.dtype)
    if given.get("dt_softplus"):
        dt = F.softplus(dt)
    low, high = given.get("dt_limit", (0.0, float("inf")))
    out = _ops.ssd(x, torch.clamp(dt, min=low, max=high), given["A"], given["B"], given["C"], None)
    if "D" not in given:
        return out
    skip = given["D"]
    return out + (skip if skip.ndim == 2 else skip[:, None]) * x.to(out.dtype)


def selective_scan(given: Given) -> Tensor:
    """Compute `mamba_selective_scan`; its tokens are in the last dim."""
    x, dt = given["hidden_states"], given["dt"]
    if "delta_bias" in given:
        dt = dt + given["delta_bias"].to(dt.dtype)[..., None]
    if given.get("delta_softplus"):
        dt = F.softplus(dt)
    rows = (x, dt, given["B"], given["C"])
    x_BTE, dt_BTE, B_BTN, C_BTN = (value.transpose(1, 2) for value in rows)
    out = _ops.selective_scan(x_BTE, dt_BTE, given["A"], B_BTN, C_BTN, None).transpose(1, 2)
    if "D" in given:
        out = out + x * given["D"][None, :, None]
    return out * F.silu(given["z"]) if "z" in given else out


@dataclass(frozen=True)
class _Op:
    """An op that stands for some functions.

    Args:
        names: the functions' names.
        call: gives what they give. takes: the arguments that it knows.
        sample: shapes of arguments for a trial, by name. others: arguments of it that are no tensors.
    """

    names: tuple[str, ...]
    call: Callable[[Given], Any]
    takes: frozenset[str]
    sample: Mapping[str, tuple[int, ...]]
    others: Mapping[str, Any]

    def trial(self) -> dict[str, Any]:
        """Arguments of a few tokens; decays are below 0."""
        draw = torch.Generator().manual_seed(0)
        found: dict[str, Any] = {}
        for name, shape in self.sample.items():
            x = torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")
            found[name] = -x.abs() if name in ("g", "A") else x
        return {**found, **self.others}


_DELTA = {"query": (1, 5, 2, 4), "key": (1, 5, 2, 4), "value": (1, 5, 2, 3), "g": (1, 5, 2), "beta": (1, 5, 2)}
_NORM = {"use_qk_l2norm_in_kernel": True}
_MORE = {"scale": 0.3, "cu_seqlens": torch.tensor([0, 2, 5])}
"""Arguments of delta rules that a reference may know: with them it is tried once more."""
_GATES = ("use_gate_in_kernel", "A_log", "dt_bias", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")
_DELTA_TAKES = frozenset({*_DELTA, *_NORM, *_GATES, "scale", "cu_seqlens"})
_SSD = {
    "hidden_states": (1, 5, 4, 3), "dt": (1, 5, 4), "A": (4,), "B": (1, 5, 2, 4), "C": (1, 5, 2, 4), "D": (4,),
    "dt_bias": (4,),
}  # fmt: skip
_SSD_OTHERS = {"chunk_size": 4, "dt_softplus": True, "dt_limit": (0.1, 2.0)}
_SCAN = {
    "hidden_states": (1, 3, 5), "dt": (1, 3, 5), "A": (3, 4), "B": (1, 4, 5), "C": (1, 4, 5), "D": (3,), "z": (1, 3, 5),
    "delta_bias": (3,),
}  # fmt: skip
_SCAN_OTHERS = {"delta_softplus": True}
OPS = (
    _Op(("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule"), gated_delta_rule, _DELTA_TAKES, _DELTA, _NORM),
    _Op(
        ("chunk_kimi_delta_attention", "chunk_kda"), kimi_delta, _DELTA_TAKES, {**_DELTA, "g": (1, 5, 2, 4)}, _NORM
    ),
    _Op(
        ("mamba2_chunk_scan", "mamba_chunk_scan_combined"), ssd, frozenset({*_SSD, *_SSD_OTHERS}), _SSD, _SSD_OTHERS
    ),
    _Op(
        ("mamba_selective_scan", "selective_scan_fn"), selective_scan, frozenset({*_SCAN, *_SCAN_OTHERS}), _SCAN,
        _SCAN_OTHERS,
    ),
)  # fmt: skip
"""All functions that are known."""
_BY_NAME = {name: op for op in OPS for name in op.names}
_WHOLE_BLOCKS = frozenset({"mamba2_split_conv1d_scan_combined", "mamba_inner_fn", "causal_conv1d_fn"})
"""transformers' functions around or beside those: of a library's kernel the reference is taken, which Dynamo reads."""

_seen: dict[int, Callable[..., Any]] = {}
"""Functions that were looked at, by `id`: kept, for an `id` is used again."""
_modules = 0
"""How many modules were loaded when they were looked through."""


def substitute_loaded() -> None:
    """Tell Dynamo of every function of the modules that are loaded now.

    transformers' reference functions loop over chunks or tokens, fla's and mamba_ssm's are kernels that Dynamo can't
    read. Inside of `with sharding.shard(batch)` Dynamo puts an op of `ops.py`, which the passes know, in the place of a
    call:

        library's name                                                      op
        torch_chunk_gated_delta_rule, chunk_gated_delta_rule                gated_delta_rule
        chunk_kimi_delta_attention, chunk_kda                               kimi_delta
        mamba2_chunk_scan, mamba_chunk_scan_combined                        ssd
        mamba_selective_scan, selective_scan_fn                             selective_scan

    A function is one of these by its name and its package, and by its numbers: where it is a reference in torch, it is
    run once on a few tokens, and left alone if the op gives something else; so is a call with arguments that are not
    read.
    """
    global _modules
    if len(sys.modules) == _modules:
        return
    for name, module in [*sys.modules.items()]:
        wrap_ropes(module)
        if name.startswith(_PACKAGES):
            wrap_modules(module)
            for function in [vars(module).get(known) for known in (*_BY_NAME, *_WHOLE_BLOCKS)]:
                if isinstance(function, FunctionType) and id(function) not in _seen:
                    _seen[id(function)] = function
                    _substitute(function)
    _modules = len(sys.modules)


def _substitute(function: FunctionType) -> None:
    name, run = function.__name__, _implementation(function)
    library = run.__module__.startswith(_LIBRARIES)
    reference: Any = getattr(function, "__wrapped__", function)
    if name in _WHOLE_BLOCKS:
        if library and reference is not run:
            _register(
                function,
                lambda args, kwargs: None if kwargs.get("seq_idx") is not None else (reference(*args, **kwargs),),
            )
        return
    op, arguments = _BY_NAME[name], _Arguments.of(run, filtered=run is not function)
    known = op.takes
    if not library:
        if not _agrees(op, reference, arguments, {}):
            return
        if run in (function, reference):
            more = {k for k, v in _MORE.items() if k in known and _agrees(op, reference, arguments, {k: v})}
            known = {*op.sample, *op.others, *more}
    read, give = (*known, *_SAME), op.call  # what Dynamo can read of a closure

    def call(args: Any, kwargs: Any) -> Any:
        own = _given(args, kwargs, arguments, read)
        unread = [k for k in own if k not in read]
        if unread and library:  # Dynamo can't read the kernel either, and says less
            torch._dynamo.graph_break(msg=f"cp_rewrite reads no call of {name} with {', '.join(unread)}")
        if unread or arguments.names[0] not in own:
            return None
        out = give(own)
        return (_as(out, own[arguments.names[0]].dtype) if library else out,)

    _register(function, call)


class _Arguments(NamedTuple):
    """Arguments of a function, by transformers' names. filtered: transformers' decorator drops others; else it may
    read them in its `**kwargs`."""

    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    filtered: bool

    @staticmethod
    def of(function: Callable[..., Any], filtered: bool) -> _Arguments:
        parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        defaults = {_NAMES.get(p.name, p.name): p.default for p in parameters if p.default is not p.empty}
        return _Arguments(tuple(_NAMES.get(p.name, p.name) for p in parameters), defaults, filtered)


def _given(args: Any, kwargs: dict[str, Any], arguments: _Arguments, read: tuple[str, ...]) -> dict[str, Any]:
    """Meaning of a call: `Given`, and arguments that are not in `read` where they differ from their default."""
    names, defaults, filtered = arguments
    named = {_NAMES.get(k, k): v for k, v in kwargs.items()}
    named = {k: v for k, v in named.items() if k in names} if filtered else named
    given = {**defaults, **dict(zip(names, args, strict=False)), **named}
    own = {k: v for k, v in given.items() if v is not None}
    return {k: v for k, v in own.items() if k in read or isinstance(v, Tensor) or v != defaults.get(k)}


def _as(out: Any, dtype: torch.dtype) -> Any:
    """In the dtype that a library's kernel gives: its first argument's."""
    return (out[0].to(dtype), *out[1:]) if isinstance(out, tuple) else out.to(dtype)


def _register(function: FunctionType, call: Callable[[Any, Any], Any]) -> None:
    """Let Dynamo trace `call` in a function's place inside of blocks. It gives a tuple of one, or None: the function
    itself runs."""
    plain = _copy(function)

    def traced(*args: Any, **kwargs: Any) -> Any:
        found = call(args, kwargs) if Blocks.inside else None
        return plain(*args, **kwargs) if found is None else found[0]

    torch.compiler.substitute_in_graph(function, skip_signature_check=True)(traced)  # type: ignore[arg-type]


def _implementation(function: FunctionType) -> Any:
    """The implementation that transformers' decorator chose; the function itself, where it has none."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells["implementation"].cell_contents if "implementation" in cells else function


def _copy(function: FunctionType) -> FunctionType:
    """The same function, which Dynamo knows nothing of."""
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__dict__ = function.__kwdefaults__, {**function.__dict__}
    return copy


def _agrees(op: _Op, reference: Callable[..., Any], arguments: _Arguments, more: Mapping[str, Any]) -> bool:
    """True if a reference in torch gives on a few tokens what the op gives, with `more` arguments."""
    trial = {**op.trial(), **more}
    given = _given((), trial, arguments._replace(filtered=False), (*op.takes,))
    try:
        with torch.no_grad():
            theirs, ours = reference(**trial), op.call({k: v for k, v in given.items() if k in op.takes})
    except Exception:
        return False
    theirs, ours = (out[0] if isinstance(out, tuple) else out for out in (theirs, ours))
    return theirs.shape == ours.shape and torch.allclose(theirs, ours, rtol=1e-3, atol=1e-4)
