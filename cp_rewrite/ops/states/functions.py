"""Functions of other libraries that pass a state through tokens, as ops of ours inside of a batch's block.

transformers' reference functions loop over chunks or tokens, fla's and mamba_ssm's are kernels that Dynamo can't read.
Inside of `with sharding.shard(batch)` Dynamo puts the op of `whole.py` in the place of a call, which the
passes know; outside it compiles what is there. Eager calls are never touched.

    library's name                                                      op
    torch_chunk_gated_delta_rule, chunk_gated_delta_rule                gated_delta_rule
    chunk_kimi_delta_attention, chunk_kda                               kimi_delta
    mamba2_chunk_scan, mamba_chunk_scan_combined                        ssd
    mamba_selective_scan, selective_scan_fn                             selective_scan

A function is one of these by its name and its package, and by its numbers: where it is a reference in torch, it is run
once on a few tokens, and left alone if the op gives something else; so is a call with arguments that are not read.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .kinds import wide
from .modules import Blocks, wrap_modules
from .rope import wrap_ropes

_ops: Any = torch.ops.cp_rewrite
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
    """Inside, Dynamo puts state ops in the place of the functions of all modules that are loaded."""
    substitute_loaded()
    Blocks.count += 1
    Blocks.inside = True
    try:
        yield
    finally:
        Blocks.count -= 1
        Blocks.inside = Blocks.count > 0


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
    """Tell Dynamo of every function of the modules that are loaded now."""
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
    """Whether a reference in torch gives on a few tokens what the op gives, with `more` arguments."""
    trial = {**op.trial(), **more}
    given = _given((), trial, arguments._replace(filtered=False), (*op.takes,))
    try:
        with torch.no_grad():
            theirs, ours = reference(**trial), op.call({k: v for k, v in given.items() if k in op.takes})
    except Exception:
        return False
    theirs, ours = (out[0] if isinstance(out, tuple) else out for out in (theirs, ours))
    return theirs.shape == ours.shape and torch.allclose(theirs, ours, rtol=1e-3, atol=1e-4)
