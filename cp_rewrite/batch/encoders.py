"""Encoders of images and videos, which run outside of the graph: eagerly, before it, whole on each rank.

    forward(input_ids, pixel_values, image_grid_thw)
        features = get_image_features(pixel_values, image_grid_thw)      loops over images by sizes read as numbers
        h = embed(input_ids).masked_scatter(ids == IMAGE, features)      each rank takes the rows of its own tokens

Dynamo can't trace such a loop. Inside of a batch's block, methods of transformers' models that take a `…_grid_thw` are
one node in its graph, `encode`, and the node's results are inputs of the graph that passes read
(`passes/capture/encoders.py`). They are the same on all ranks. A rank's gradient of them is that of its own tokens: a
part, as of weights, so that an encoder's weights get parts too.

Which tensors a method returns, and how wide, is learned by a first run of it while Dynamo traces; how many rows they
have is left open. What it returns as a tuple or a list, one tensor for each image, is one tensor there, all images'
rows one behind another, as models join them: `torch.cat` of all and `len` are what may be asked of it, and all else is
refused (`_EACH`). A method that is given tokens, or anything but the model's own arguments, is traced as all else.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cp_rewrite.agree import turns
from cp_rewrite.ops.states.functions import Blocks
from cp_rewrite.refusal import Reason, Refusal, RewriteRefused
from cp_rewrite.torch_internals import (
    comptime,  # pyright: ignore[reportAttributeAccessIssue]
    mode_of,
    traced_object,  # pyright: ignore[reportAttributeAccessIssue]
    traced_values,
)

from .active import last_batch
from .as_row import AsRow

METHODS = ("get_image_features", "get_video_features")
_ADDS = "_deepstack_process"
"""Method by which Qwen3-VL and its like add rows of images to later layers."""
_PLACES = "get_rope_index"
"""Method that makes positions of the tokens of whole rows, by their numbers."""
_PACKAGES = ("transformers.models.", "transformers_modules.")


class Result(NamedTuple):
    """A tensor of what a method returns: the name of its field, its place where that is a list, what holds a tensor for
    each image where it is all of them joined, whether they are as many as sizes were given, its dtype, and its sizes
    behind the first."""

    name: str
    place: int | None
    each: str | None
    counted: bool
    dtype: torch.dtype
    sizes: tuple[int, ...]


class Learned(NamedTuple):
    """A method's call: the class of what it returns, the names of its arguments, its results, and whether it drew
    random numbers."""

    kind: Any
    names: tuple[str, ...]
    results: tuple[Result, ...]
    drew: bool


@dataclass
class _Known:
    """A traced module: the one whose methods run, what was learned by method, whether weights were compared."""

    owner: weakref.ref[nn.Module]
    learned: dict[str, Learned] = field(default_factory=dict[str, Learned])
    compared: bool = False


_known: dict[int, _Known] = {}
"""By `id` of the module that was traced, on which Dynamo guards."""
_modules = 0
"""How many modules were loaded when they were looked through."""


def has_encoders(module: nn.Module) -> bool:
    """True of a module with such methods."""
    return any(_takes_sizes(getattr(type(module), method, None)) for method in METHODS)


def images_of(module: nn.Module) -> list[str]:
    """The arguments that hold images, or videos: the first of each such method."""
    methods = [getattr(type(module), method) for method in METHODS if hasattr(type(module), method)]
    return [[*inspect.signature(method).parameters][1] for method in methods]


def _takes_sizes(plain: Any) -> bool:
    return plain is not None and _sizes_among(inspect.signature(plain).parameters) is not None


def _sizes_among(names: Iterable[str]) -> str | None:
    """The argument that holds a row of sizes for each image, or video."""
    return next((name for name in names if name.endswith("_grid_thw")), None)


def stands_for(twin: nn.Module, module: nn.Module) -> None:
    """Let nodes that Dynamo traced on one module run another's methods."""
    _known[id(twin)] = _Known(weakref.ref(module))
    weakref.finalize(twin, _known.pop, id(twin), None)


def wrap_encoders() -> None:
    """Wrap what is traced otherwise in all classes that are loaded, once."""
    global _modules
    if len(sys.modules) == _modules:
        return
    _modules = len(sys.modules)
    for module in [module for name, module in [*sys.modules.items()] if name.startswith(_PACKAGES)]:
        for kind in [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, nn.Module)]:
            for name in (*METHODS, _ADDS, _PLACES):
                plain = vars(kind).get(name)
                if plain is None or hasattr(plain, "_cp_rewrite"):
                    continue
                if name in METHODS and _takes_sizes(plain):
                    setattr(kind, name, _in_blocks(plain, _encoder(plain, name)))
                elif name == _ADDS and _adds_rows(plain):
                    setattr(kind, name, _in_blocks(plain, lambda _, h, mask, rows: rows_added(h, mask, rows)))
                elif name == _PLACES:
                    setattr(kind, name, _in_blocks(plain, _no_places))


def _in_blocks(plain: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    """Runs as ever; inside of a batch's block Dynamo traces another function."""

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        # `is_compiling` is true of what runs while Dynamo traces, too.
        inside = torch.compiler.is_dynamo_compiling() and Blocks.inside
        return (traced if inside else plain)(self, *args, **kwargs)

    method._cp_rewrite = True  # type: ignore[attr-defined]
    return method


def _encoder(plain: Callable[..., Any], method: str) -> Callable[..., Any]:
    names, held = [*inspect.signature(plain).parameters][1:], f"_cp_rewrite_{method}"
    sizes = _sizes_among(names)

    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args)), **kwargs}  # noqa: B905
        comptime(_learn)
        learned = getattr(self, held)
        if learned is None:
            return plain(self, *args, **kwargs)
        kind, read, results, _ = learned
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        tensors = encode(id(self), method, trained, read, *[given[name] for name in read])
        fields: dict[str, Any] = {}
        for (name, place, each, counted, *_), tensor in zip(results, tensors):  # noqa: B905
            if each is not None:
                fields[name] = _EACH[each](())
                fields[name].joined = tensor
                fields[name].number = given[sizes].shape[0] if sizes and counted else None
            elif place is None:
                fields[name] = tensor
            else:
                fields.setdefault(name, []).append(tensor)
        return kind(**fields)

    return traced


def _no_places(*_: Any, **__: Any) -> None:
    torch._dynamo.graph_break(
        msg=f"positions of images are made of whole rows: call {_PLACES} of the model before shard, and give the batch "
        "position_ids (docs/guides/images.md)"
    )


def _learn(context: Any) -> None:
    """Before Dynamo traces what a method returns: run it on what the first batch has."""
    traced, method = traced_object(context, "self"), context.get_local("method").as_python_constant()
    batch = last_batch()
    tokens = () if batch is None else batch.handed.tokens
    given = traced_values(context, "given", leave_out=tokens)
    learned = None
    if given is not None and not any(type(value) is AsRow for value in given.values()):
        if id(traced) not in _known:
            stands_for(traced, traced)
        devices = [x.device for x in given.values() if isinstance(x, Tensor) and x.is_cuda]
        with torch.no_grad(), torch.random.fork_rng(devices=devices[:1]):
            out, drew = _run(_known[id(traced)], method, given)
        results = tuple(result for result, _ in _results(out, given))
        learned = _known[id(traced)].learned[method] = Learned(type(out), tuple(given), results, drew)
    vars(traced)[f"_cp_rewrite_{method}"] = learned


def _run(known: _Known, method: str, given: Mapping[str, Any]) -> tuple[Any, bool]:
    """(what a method returns, whether it drew random numbers)."""
    owner, before = known.owner(), _states(given)
    assert owner is not None, "a model is there while it is called"
    out = getattr(owner, method)(**given)
    return out, not all(map(torch.equal, before, _states(given)))


def _states(given: Mapping[str, Any]) -> list[Tensor]:
    """The states of random generators."""
    devices = dict.fromkeys(x.device for x in given.values() if isinstance(x, Tensor) and x.is_cuda)
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def _results(out: Mapping[str, Any], given: Mapping[str, Any]) -> list[tuple[Result, Tensor]]:
    """The tensors of what a method returned, in order. given: its arguments."""
    found: list[tuple[tuple[str, int | None, str | None, bool], Tensor]] = []
    for name, value in out.items():
        if isinstance(value, Tensor):
            found.append(((name, None, None, False), value))
        elif name == "pooler_output":
            kind, sizes = "list" if isinstance(value, list) else "tuple", given[str(_sizes_among(given))]
            found.append(((name, None, kind, len(value) == len(sizes)), torch.cat(tuple(value))))
        elif value is not None:
            found += [((name, place, None, False), x) for place, x in enumerate(value)]
    return [(Result(*start, x.dtype, tuple(x.shape[1:])), x) for start, x in found]


def encode(traced: int, method: str, trained: bool, names: Sequence[str], *values: Any) -> list[Tensor]:
    """Fake tensors of what a method of a module gives of fake arguments, (N, …) each, of an open N.

    Args:
        traced: `id` of the module that Dynamo traced. trained: whether a gradient may be asked for.
        names: of the arguments `values`.
    """
    (first, *_) = [x for x in values if isinstance(x, Tensor)]
    mode = mode_of(first)
    assert mode is not None, "the node is gone where a graph runs"
    opened = [_open(mode, result, first.device) for result in learned_of(traced, method).results]
    return [x.requires_grad_(trained and x.is_floating_point()) for x in opened]


def encoded(traced: int, method: str, _: bool, names: Sequence[str], *values: Any) -> list[tuple[Result, Tensor]]:
    """Results of the method: the tensors that `encode` stands for.

    Raises:
        RewriteRefused: it drew random numbers.
    """
    known, given = _known[traced], dict(zip(names, values, strict=True))
    if not known.compared and (batch := last_batch()) is not None:
        known.compared, owner = True, known.owner()
        assert owner is not None
        turns.on_weights(batch.sharding, dict(owner.named_parameters()))
    out, drew = _run(known, method, given)
    if drew:
        raise RewriteRefused([drawn(method)])
    return _results(out, given)


torch._dynamo.allow_in_graph(encode)


def learned_of(traced: int, method: str, *_: Any) -> Learned:
    """The facts that were learned of the method that a call of `encode` runs."""
    return _known[traced].learned[method]


def drawn(method: str, line: str | None = None) -> Refusal:
    """The refusal of a method that draws random numbers."""
    text = f"{method} draws random numbers, others on each rank, and runs on all ranks: let its encoder have no dropout"
    return Refusal(Reason.DROPOUT, text, line=line)


def _each(kind: type) -> Any:
    """Make the stand-in, where Dynamo traces, for a tuple or a list with a tensor for each image: one tensor `joined`,
    and the `number` of images; None: it is not known."""

    def refuse() -> None:
        torch._dynamo.graph_break(
            msg="an encoder gives a tensor for each image: torch.cat(…, dim=0) of them all, and how many they are, is "
            "all that may be read of them (docs/guides/images.md)"
        )

    def refused(*_: Any, **__: Any) -> None:
        refuse()

    def length(self: Any) -> Any:
        return refuse() if self.number is None else self.number

    def __torch_function__(_: Any, function: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**dict(zip(("tensors", "dim"), args)), **(kwargs or {})}  # noqa: B905
        tensors, dim = given.pop("tensors", None), given.pop("dim", 0)
        if (
            given
            or dim != 0
            or type(tensors) is not each
            or function not in (torch.cat, torch.concat, torch.concatenate)
        ):
            return refuse()
        return torch.cat((tensors.joined,), dim=0)

    ours = {"__new__", "__init__", "__getattribute__", "__class_getitem__", "__doc__"}
    asked = {name: refused for name in vars(kind) if name not in ours}
    more = {"__len__": length, "__torch_function__": classmethod(__torch_function__)}
    each = type("Each", (kind,), {**asked, **more})  # __torch_function__ reads it
    return each


_EACH = {kind.__name__: _each(kind) for kind in (tuple, list)}


def _open(mode: Any, result: Result, device: torch.device) -> Tensor:
    rows = mode.shape_env.create_unbacked_symint()
    with mode:
        return torch.empty((rows, *result.sizes), dtype=result.dtype, device=device)


def rows_added(h: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """`h[mask] + rows` in the place of `h[mask]`. h: (B, T, C). mask: (B, T) bool. rows: (N, C), in tokens' order."""
    torch._check_tensor_all(mask.sum() == rows.shape[0])
    return h + torch.zeros_like(h).masked_scatter(mask[..., None], rows.to(h.device, h.dtype))


def _adds_rows(plain: Any) -> bool:
    """True if a model's own function gives on a few tokens what `rows_added` gives."""
    h, rows = torch.arange(24.0, device="cpu").view(2, 3, 4), torch.arange(12.0, device="cpu").view(3, 4) / 7
    mask = torch.tensor([[True, False, True], [False, True, False]], device="cpu")
    try:
        return torch.equal(plain(None, h.clone(), mask, rows), rows_added(h, mask, rows))
    except Exception:
        return False
