"""The blocks of a model: what FSDP gathers at a time, and what Dynamo reads once where several are alike.

    layers 0 1 2 … 63 of one class      marked: Dynamo reads layer 0, finds by its guards that the others read alike,
                                        and calls its graph once for each (torch from 2.13 on)

These guards do not see all: not the classes of modules of torch inside of a block, nor a forward that one of them was
given, nor that True is not 1. So only blocks of one `_makeup` are marked together, and a call says which `_kinds` of
numbers it was given. And not what the model writes into objects of Python between two calls, where a block reads it on
another way: a model that writes into any is read apart.

A model that can't be read so is read block by block, as before: what it costs is one more trial.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.graph.dynamo import written_objects
from cp_rewrite.torch_internals import READS_REGIONS_ONCE, raised_in_capture

log = logging.getLogger(__name__)
T = TypeVar("T")


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The entries of a model's lists of modules that have weights and a forward: its layers. Lists inside of such an
    entry, as of experts, are not looked at."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList | nn.Sequential | nn.ModuleDict):
                entries = [entry for entry in child.children() if _is_block(entry)]
                found.extend(entries)
                if not entries:
                    visit(child)
            else:
                visit(child)

    visit(model)
    return list(dict.fromkeys(found))


def _is_block(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict) and any(True for _ in module.parameters())


class ReadApart(BaseException):
    """The blocks of a model can't be read once for all. No Exception: no handler of Dynamo's looks at it."""


class ReadOnce:
    """Blocks of a model that Dynamo reads once for all of one class, as long as that works.

    `able`: they are compile regions to Dynamo now; what their calls are checkpointed by is inside.
    """

    def __init__(self, model: Any) -> None:
        blocks = find_blocks(model) if isinstance(model, nn.Module) and READS_REGIONS_ONCE else []
        alike: dict[Hashable, list[nn.Module]] = {}
        for block in blocks:
            if any(True for _ in block.children()):
                alike.setdefault(_makeup(block), []).append(block)
        marked = [(number, block) for number, group in enumerate(alike.values()) if len(group) > 1 for block in group]
        self._plain = [(weakref.ref(block), type(block)) for _, block in marked]
        self.able = bool(self._plain)
        for number, block in marked:
            block.__class__ = _region(type(block), number)

    def call(self, run: Callable[[], T]) -> T:
        """`run`, which compiles a call of the model; once more with the blocks as they were, where it can't be read.

        Args:
            run: raises ReadApart, or an error while Dynamo compiles, where that is so.
        """
        if self.able:
            try:
                return run()
            except (ReadApart, Exception) as error:
                if not isinstance(error, ReadApart) and not raised_in_capture(error):
                    raise
                log.info("blocks are read one by one: %s", error.__cause__ or error)
                self.end()
        return run()

    @contextmanager
    def trial(self) -> Generator[bool]:
        """Surround work on a captured graph, and tell whether blocks are regions in it: its errors are ReadApart then.

        Raises:
            ReadApart: by something that torch's guards do not see, a block's graph may stand for one that is another.
        """
        if self.able:
            self._check_alike()
        try:
            yield self.able
        except Exception as error:
            if self.able:
                raise ReadApart from error
            raise

    def _check_alike(self) -> None:
        collector = OUTPUT_CAPTURING.replace(".", "_dot_")  # as Dynamo names globals of modules
        if written := [name for name in written_objects() if collector not in name]:
            raise ReadApart(f"the model writes into {written[0]}")
        makeups: dict[type[nn.Module], Hashable] = {}
        for held, plain in self._plain:
            if (block := held()) is not None and makeups.setdefault(type(block), found := _makeup(block)) != found:
                raise ReadApart(f"blocks of {plain.__name__} are no longer alike")

    def accept(self, refusals: Sequence[object]) -> None:
        """Raise ReadApart where blocks are regions and something stands against the graph: read block by block, it is
        said of every layer."""
        if self.able and refusals:
            raise ReadApart("; ".join(map(str, refusals)))

    def end(self) -> None:
        """Give blocks their classes back."""
        self.able = False
        for block, plain in self._plain:
            if (module := block()) is not None:
                module.__class__ = plain


OUTPUT_CAPTURING = "transformers.utils.output_capturing"
"""A module of transformers that keeps what hooks of its own see of a call's layers."""
OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has for itself."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _makeup(block: nn.Module) -> Hashable:
    """Name, class, mode, absent entries and hooks of a block and of each module inside, functions that it was given,
    and types of its other attributes."""
    found: list[Hashable] = []
    for name, module in block.named_modules(remove_duplicate=False):
        held = vars(module)
        absent = [key for kind in ("_parameters", "_buffers", "_modules") for key, x in held[kind].items() if x is None]
        hooks = [(kind, id(hook)) for kind in HOOKS for hook in held[kind].values()]
        own = [(key, x) for key, x in held.items() if key not in OF_MODULES]
        given = [(key, id(x) if callable(x) else (type(x), *map(type, tree_leaves(x)))) for key, x in own]
        found.append((name, type(module), module.training, *map(tuple, (absent, hooks, given))))
    return tuple(found)


@functools.cache
def _region(plain: type[nn.Module], number: int) -> type[nn.Module]:
    """The class of a block as one whose calls Dynamo reads as a region. It tells regions apart by their code: those of
    another `number` have another."""

    def call(self: Any, kinds: str, *args: Any, **kwargs: Any) -> Any:
        return plain.__call__(self, *args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=f"call_{number}")
    region: Any = torch.compiler.nested_compile_region(call, max_reuse_entries=1 << 30)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return region(self, _kinds((args, kwargs)), *args, **kwargs)

    return type(
        plain.__name__, (plain,), {"__call__": __call__, "__module__": plain.__module__, "__doc__": plain.__doc__}
    )


def _kinds(value: Any) -> str:
    """The types of numbers among arguments: to Dynamo calls with 1, 1.0 and True are the same."""
    if isinstance(value, tuple | list):
        return f"({','.join([_kinds(part) for part in value])})"
    if isinstance(value, dict):
        return _kinds([*value.values()])
    return type(value).__name__ if isinstance(value, bool | int | float | complex) else ""
