"""The blocks of a model: what FSDP gathers at a time, and what Dynamo reads once where several are alike.

    layers 0 1 2 … 63 of one class      marked: Dynamo reads layer 0, finds by its guards that the others read alike,
                                        and calls its graph once for each (torch from 2.13 on)

A model that can't be read so is read block by block, as before: what it costs is one more trial.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from cp_rewrite.torch_internals import CAPTURE_ERRORS, READS_REGIONS_ONCE

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
        blocks = [block for block in blocks if any(True for _ in block.children())]
        counts = Counter(map(type, blocks))
        self._plain = [(weakref.ref(block), type(block)) for block in blocks if counts[type(block)] > 1]
        self.able = bool(self._plain)
        for block, plain in self._plain:
            block().__class__ = _region(plain)  # type: ignore[union-attr]

    def call(self, run: Callable[[], T]) -> T:
        """`run`, which compiles a call of the model; once more with the blocks as they were, where it can't be read.

        Args:
            run: raises ReadApart, or an error of Dynamo, where that is so.
        """
        if self.able:
            try:
                return run()
            except (ReadApart, *CAPTURE_ERRORS) as error:
                log.info("blocks are read one by one: %s", error.__cause__ or error)
                self.end()
        return run()

    @contextmanager
    def trial(self) -> Generator[bool]:
        """Around work on a captured graph; tells whether blocks are regions in it. Errors are ReadApart then."""
        try:
            yield self.able
        except Exception as error:
            if self.able:
                raise ReadApart from error
            raise

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


@functools.cache
def _region(plain: type[nn.Module]) -> type[nn.Module]:
    """The class of a block as one whose calls Dynamo reads as a region."""
    call: Any = torch.compiler.nested_compile_region(plain.__call__, max_reuse_entries=1 << 30)
    return type(plain.__name__, (plain,), {"__call__": call, "__module__": plain.__module__, "__doc__": plain.__doc__})
