"""Programs one step beside those of the rules' tests: a token of a program's source is changed, and it is run on ranks.

"cat_first": lambda m, h: h - torch.cat((h[:, :1], h[:, :-1]), 1)         tests/end_to_end/test_neighbours.py
                                                      2                   neighbours-cat_first-54:72 1 -> 2
"""

from __future__ import annotations

import ast
import random
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cp_rewrite as cp
from cp_rewrite.planning.names import LAYOUTS
from tests.border.forks import failure_of
from tests.border.outcome import Kind, Outcome
from tests.end_to_end import test_picked, test_scans
from tests.helpers import packed_model
from tests.helpers.one_process import check_all
from tests.helpers.source_mutants import Mutant, Place, changed, mutants_of

LIMIT = 1e-6
"""Relative norm error of a loss or a gradient in fp64."""
POSITIONED = {**test_picked.TOKENS, "position_ids": 1}
Part = tuple[Place, Place]
"""Where it begins in a file, and where it ends."""
FOLDER = Path(__file__).parent.parent / "end_to_end"


@dataclass(frozen=True)
class Family:
    """The programs of a file of tests. make: name of what makes a model of some of them. batch: of (rows, tokens)."""

    file: str
    make: str
    batch: Callable[[int, int], Mapping[str, Any]] = packed_model.packed_batch
    tokens: Mapping[str, int] = field(default_factory=lambda: packed_model.TOKENS)


FAMILIES = {
    "sums": Family("test_resolved.py", "Resolved"),
    "neighbours": Family("test_neighbours.py", "Neighbours"),
    "picked": Family("test_picked.py", "Picked", test_picked.packed, test_picked.TOKENS),
    "scans": Family("test_scans.py", "model_of", test_scans.packed, POSITIONED),
    "fewer": Family("test_fewer_tokens.py", "Fewer"),
    "chunks": Family("test_chunked_losses.py", "Chunked"),
    "functions": Family("test_own_backward.py", "Functions"),
    "tables": Family("test_tables.py", "Tables"),
    "experts": Family("test_experts.py", "Experts"),
}
SWAPS: dict[str, Sequence[str]] = {
    ".sum(": [".mean(", ".amax("], ".mean(": [".sum(", ".amin("], ".mean()": [".sum()", ".std()", ".norm()"],
    ".amax(": [".sum("], ".sum()": [".mean()", ".norm()"], ".std()": [".var()"], ".norm(": [".sum("],
    ".cumsum(": [".cumprod(", ".logcumsumexp(", ".flip("], ".cumprod(": [".cumsum("], ".flip(": [".cumsum("],
    ".sin()": [".cumsum(1)", ".mean(1, keepdim=True)", ".roll(1, 1)", ".flip(1)", ".detach()", "[:, -1:]"],
    ".tanh()": [".amax(1, keepdim=True)", ".cumsum(1)", " * h.shape[1]", ".detach()", "[:, :1]"],
    ".square()": [".cumsum(1)", ".abs()", ".mean(1, keepdim=True)", " / h.numel()"],
    "[:, 1:": ["[:, :-1", "[:, 2:", "[:, ::2"], "[:, :-1": ["[:, 1:", "[:, :-2", "[:, -1:"], "[:, :1]": ["[:, :2]"],
    "h.shape[1]": ["(h.shape[1] - 1)", "(h.shape[1] // 2)"], "x.shape[1]": ["(x.shape[1] + 1)", "9"],
    '"sum"': ['"mean"', '"none"'], '"mean"': ['"sum"'], '"none"': ['"mean"'], ".detach()": [""], "dim=1": ["dim=-1"],
    "-100": ["0"], "zeros": ["ones"], "keepdim=True": ["keepdim=False"], ".clamp(": [".add("],
    "scatter_add": ["scatter"], ", m.": [", 2 * m."], "index_add": ["index_copy"], ".chunk(2": [".chunk(3"],
    "cat([": ["stack(["], "F.pad(h": ["F.pad(2 * h"], "argmax(": ["argmin("],
    ".argsort(": [".flip("], "saved_tensors": ["saved_tensors[::-1]"],
}  # fmt: skip
"""Text in a program -> what it becomes: another op of the token dim, a place beside, a whole for a part."""
LEFT_OUT = frozenset({"counted"})
"""It writes into a buffer, of which the threads that play ranks have one."""


@dataclass(frozen=True)
class RuleMutant:
    """`case`: the program of the family that the change is in, or that calls what it is in."""

    family: str
    case: str
    change: Mutant

    def __str__(self) -> str:
        return f"{self.family}-{self.case}-{self.change.name.partition(':')[2]}"

    def model(self) -> nn.Module:
        """The changed model, in fp64. The code that makes it runs in a module of its own."""
        family = FAMILIES[self.family]
        file = FOLDER / family.file
        module = types.ModuleType(f"mutant_of_{file.stem}")
        sys.modules[module.__name__] = module  # where Dynamo looks its globals up
        exec(compile(self.change.applied(file.read_text()), str(file), "exec"), vars(module))
        make = vars(module)[family.make]
        return Summed(make(self.case if self.family == "chunks" else [self.case]).double())


class Summed(nn.Module):
    """Sum of a model's losses, where it has several: each has another weight."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Any:
        out = self.model(**batch)
        if not isinstance(out, dict):
            return out
        found: list[Tensor] = list(out.values())  # pyright: ignore[reportUnknownArgumentType]
        return sum((x * (1 + i / 7) for i, x in enumerate(found[1:])), found[0])


def draw(count: int, seed: int = 0) -> list[RuleMutant]:
    """`count` mutants, as many of each family."""
    chance = random.Random(seed)
    each = [sorted(_of_family(name), key=str) for name in FAMILIES]
    for found in each:
        chance.shuffle(found)
    turns = [found[i] for i in range(max(map(len, each))) for found in each if i < len(found)]
    return turns[:count]


def _of_family(name: str) -> Iterator[RuleMutant]:
    """All there are."""
    file = FAMILIES[name].file
    text = (FOLDER / file).read_text()
    places = {case: parts for case, parts in _programs(ast.parse(text)).items() if case not in LEFT_OUT}
    for change in [*mutants_of(name, file, text), *_swaps(name, file, text)]:
        for case, parts in places.items():
            if any(part[0] <= (change.line, change.column) < part[1] for part in parts):
                yield RuleMutant(name, case, change)
                break


def _swaps(room: str, file: str, text: str) -> Iterator[Mutant]:
    for number, line in enumerate(text.splitlines(), 1):
        for before, afters in SWAPS.items():
            for match in re.finditer(re.escape(before), line):
                for after in afters:
                    source = changed(line, match.start(), before, after).strip()
                    yield Mutant(room, file, number, match.start(), before, after, source)


def _programs(tree: ast.Module) -> dict[str, list[Part]]:
    """The parts of each program: its entry in a table, and the functions that it calls."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found: dict[str, list[Part]] = {}
    for table in ("MIXES", "LOSSES", "POSITIONED", "DISPATCHES"):
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == table:
                assert isinstance(node.value, ast.Dict)
                for key, value in zip(node.value.keys, node.value.values, strict=True):
                    assert key is not None
                    found[ast.literal_eval(key)] = [_part(node) for node in _reached(value, functions)]
    return found


def _reached(value: ast.expr, functions: Mapping[str, ast.FunctionDef]) -> list[ast.AST]:
    parts: list[ast.AST] = [value]
    for part in parts:
        for node in ast.walk(part):
            if isinstance(node, ast.Name) and (called := functions.get(node.id)) is not None and called not in parts:
                parts.append(called)
    return parts


def _part(node: Any) -> Part:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def observe(mutant: RuleMutant, number: int) -> Outcome | None:
    """Outcome of a mutant on ranks played by threads, in two batches that follow each other; None: one process fails,
    or what it gives is not finite."""
    family, rows = FAMILIES[mutant.family], 1 + number % 2
    batches = [_of_doubles(family.batch(rows, tokens)) for tokens in (13, 18)]
    torch._dynamo.reset()
    if not all(_is_valid(mutant, batch) for batch in batches):
        return None
    layout: Any = sorted(LAYOUTS)[number % len(LAYOUTS)]
    sharding = cp.Sharding(2 + number % 3 // 2, family.tokens, cp.DocumentIds("doc_ids"), layout)
    try:
        reports = check_all(mutant.model(), sharding, batches)
    except Exception as error:
        failure = failure_of(error)
        kind = Kind.RAISED if failure.ours else Kind.UNTRACED if failure.untraced else Kind.CRASHED
        return Outcome(Kind.REFUSED if failure.reasons else kind, f"{failure.kind}: {failure.message}")
    worst = max(report.largest for report in reports)
    return Outcome(Kind.RIGHT if worst <= LIMIT else Kind.SILENT, "\n".join(map(str, reports)))


def _is_valid(mutant: RuleMutant, batch: Mapping[str, Any]) -> bool:
    try:
        model = mutant.model()
        # As `cp.check` asks for gradients, which checkpoints of the older kind refuse.
        loss = model(**batch)
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    except Exception:
        return False
    return all(bool(x.isfinite().all()) for x in (loss, *grads) if x is not None)


def _of_doubles(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in batch.items()}
