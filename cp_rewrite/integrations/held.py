"""Objects of Python that the attributes of a model's modules hold: its twin shares them, or has copies.

self.stats = []                      shared: what the model puts in, its user finds there
self.scale = torch.tensor(2.0)       shared
self.by_name = {"head": self.head}   a copy, of the twin's head: nothing may write into it
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterable
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from cp_rewrite.passes.graph.dynamo import known_objects
from cp_rewrite.segments.blocks import HOOKS, OF_MODULES
from cp_rewrite.torch_internals import memory_id

_ATOMS = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, weakref.ref, str, bytes, int, float, complex)
"""Kinds that a deep copy shares too, and that are not looked into."""


_WEIGHT = object()
"""Stands for a weight, which goes when it is sharded."""


class Counterpart(NamedTuple):
    """An object of a model, which its twin has another in the place of: the name, the other's `id`, and whether it is
    a module of the model, whose attributes follow those of the other."""

    name: str
    stand_in: int
    follows: bool


class HeldObjects:
    """Objects that the twin of a model has in the place of the model's.

    `memo`: by `id` of an object what stands for it, as `copy.deepcopy` takes it: what holds neither a module nor a
    weight of the model stands for itself. `pairs`: by `id`, the others.
    """

    def __init__(self, model: nn.Module, stand_ins: dict[int, Any]) -> None:
        """`stand_ins`: of the model's weights, by id.

        Raises:
            ValueError: a tensor that a module holds shares memory with a weight, or takes gradients and is no weight;
                or an object that holds modules can't be copied.
        """
        weights = dict(model.named_parameters())
        self._of_model = {id(module): name for name, module in model.named_modules()} | dict.fromkeys(stand_ins, "")
        self._memory = {memory_id(p): name for name, p in weights.items() if p.numel() and not p.is_meta}
        self._copied: dict[int, tuple[str, Any, list[Any]]] = {}
        self.memo: dict[int, Any] = stand_ins | {id(buffer): buffer for buffer in model.buffers()}
        self.pairs: dict[int, Counterpart] = {}
        for name, buffer in model.named_buffers():
            self._check_tensor(name, buffer)
        self._share([pair for name, module in model.named_modules() for pair in _values(name, module)])
        for name, value, _ in self._copied.values():
            self._copy(name, value)
        self.twin = copy.deepcopy(model, self.memo)
        for key in stand_ins:  # FSDP lets the weights go: other objects get their numbers
            del self.memo[key], self._of_model[key]
        self._memory.clear()
        self._note_pairs()

    def stand_in(self, name: str, value: Any) -> Any:
        """The value of an attribute as the twin has it: itself, or a copy where it holds modules."""
        self._share([(name, value)])
        found = self._copy(name, value)
        self._note_pairs()
        return found

    def _copy(self, name: str, value: Any) -> Any:
        try:
            return copy.deepcopy(value, self.memo)
        except Exception as error:
            raise ValueError(
                f"{name} holds modules or weights, and can't be copied ({type(error).__name__}: {error}): let it hold "
                "none, or none but in lists and dicts"
            ) from error

    def check(self) -> None:
        """Raise a RuntimeError where an object that the twin has a copy of holds other things than when it was made."""
        for name, value, before in self._copied.values():
            now = _parts(value)
            if len(now) != len(before) or not all(a is b or b is _WEIGHT for a, b in zip(now, before, strict=True)):
                raise RuntimeError(
                    f"{name} holds modules and was changed after parallelize, which knows what it held before: change "
                    "it first, or keep what changes in an object that holds no module"
                )

    def _note_pairs(self) -> None:
        names = {key: (name or "the model", True) for key, name in self._of_model.items()}
        names |= {key: (name, False) for key, (name, *_) in self._copied.items()}
        self.pairs |= {
            k: Counterpart(name, id(self.memo[k]), own) for k, (name, own) in names.items() if k in self.memo
        }

    def _share(self, values: Iterable[tuple[str, Any]]) -> None:
        """Look through named values for what holds no module and no weight of the model."""
        found, holders = dict[int, tuple[str, Any]](), dict[int, list[int]]()
        todo: list[tuple[str, int | None, Any]] = [(name, None, value) for name, value in values]
        apart: list[int] = []
        while todo:
            name, holder, value = todo.pop()
            key = id(value)
            if isinstance(value, _ATOMS) or self.memo.get(key) is value:
                continue
            if holder is not None:
                holders.setdefault(key, []).append(holder)
            if key in self._of_model or key in self._copied:
                apart.append(key)
            elif key not in found:
                found[key] = name, value
                if isinstance(value, Tensor):
                    self._check_tensor(name, value)
                else:
                    todo += [(name, key, part) for part in _parts(value)]
        copied: set[int] = set()
        while apart:
            more = {key for key in holders.get(apart.pop(), ()) if key not in copied}
            copied |= more
            apart += more
        self.memo |= {key: value for key, (_, value) in found.items() if key not in copied}
        for name, value in map(found.__getitem__, copied):
            parts = [_WEIGHT if isinstance(part, nn.Parameter) else part for part in _parts(value)]
            self._copied[id(value)] = name, value, parts

    def _check_tensor(self, name: str, tensor: Tensor) -> None:
        if tensor.requires_grad:
            raise ValueError(
                f"{name} holds a tensor that takes gradients and is no weight of the model: make it a parameter of one "
                "of its modules, or detach it"
            )
        if not tensor.is_meta and tensor.numel() and (weight := self._memory.get(memory_id(tensor))) is not None:
            raise ValueError(
                f"{name} shares memory with {weight}, which parallelize puts elsewhere: it would stay as it is while "
                "that is trained. Read the weight itself, or clone it"
            )


def check_written(pairs: dict[int, Counterpart]) -> bool:
    """True if the frame that Dynamo compiles now writes into modules of the twin.

    Raises:
        ValueError: it writes into an object that has a stand-in, where others read the other of the two.
    """
    known, keeps = known_objects(), False
    for key, pair in pairs.items():
        written = [known[k] for k in (key, pair.stand_in) if k in known]
        if any(written) and (len(written) == 2 or not pair.follows):
            raise ValueError(
                f"the model writes into {pair.name}, "
                + ("which it also reaches past its own modules" if pair.follows else "which holds modules")
                + ": parallelize runs it on copies of both. Keep what changes in an object of Python that holds no "
                "module, such as a list or a dict"
            )
        keeps |= any(written)
    return keeps


def _values(name: str, module: nn.Module) -> list[tuple[str, Any]]:
    """Names and values of all that a module holds beside weights, buffers and modules, hooks one by one."""
    hooks = [(f"a hook of {name or 'the model'}", hook) for kind in HOOKS for hook in getattr(module, kind).values()]
    own = [(f"{name}.{key}" if name else key, value) for key, value in vars(module).items() if key not in OF_MODULES]
    return hooks + own


def _parts(value: Any) -> list[Any]:
    """All that an object holds: the values of its `__dict__` and, unless it is a module, what else it refers to."""
    held: dict[str, Any] = getattr(value, "__dict__", {})
    return [*held.values(), *(() if isinstance(value, nn.Module) else gc.get_referents(value))]
