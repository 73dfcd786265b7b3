"""How large the house is, and how far one must walk in it: `python -m tests.house` prints its measures as a table.

files imported from one place only    a file that one other imports, and that could stand in it
to understand FILE                    the file and all that it imports, and that these import, and so on
longest chain of imports              files of which each imports the next
a graph on its way through the passes a small packed model is captured: in each pass the rooms whose functions run,
                                      once each, are its stays; a return is a stay in a room that an earlier had
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType
from typing import Any

from tests.test_rooms import ROOT, SOURCES, imports

READ = "passes.locality.walk"
"""The file that the proof begins in."""
LENGTHS = {
    "Length": r"^class Length\b", "Place": r"^class Place\b", "linear_in": r"^def linear_in\b",
    "Number": r"^class Number\b", "TokenCount": r"^class TokenCount\b", "token_count": r"^def token_count\b",
}  # fmt: skip
"""Types and readers of numbers a T + b, by how their definitions begin."""


def graph_of_imports() -> dict[str, set[str]]:
    """Module -> those that it imports; imports inside of functions left out."""
    return {module: {other for other, late in imports(module) if not late} - {module} for module in SOURCES}


def lines(modules: Iterable[str]) -> int:
    return sum(len(SOURCES[module].read_text().splitlines()) for module in modules)


def read_for(module: str, graph: Mapping[str, set[str]]) -> set[str]:
    """The module, and what must be read for it."""
    found, pending = set[str](), [module]
    while pending:
        if (each := pending.pop()) not in found:
            found.add(each)
            pending += graph[each]
    return found


def longest_chain(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules of which each imports the next."""
    chains: dict[str, list[str]] = {}
    for module in TopologicalSorter(graph).static_order():
        longest = max((chains[other] for other in graph[module]), key=len, default=[])
        chains[module] = [module, *longest]
    return max(chains.values(), key=len)


def glossary() -> list[str]:
    """The words of the glossary, those that share a row one by one."""
    text = (ROOT / "docs" / "internals" / "architecture.md").read_text().partition("## Glossary")[2]
    rows = [row.split("|")[1] for row in text.splitlines() if row.startswith("| ")]
    return [word.strip() for row in rows[1:] for word in row.split(",") if word.strip(" -")]


def defined(patterns: Mapping[str, str]) -> list[str]:
    """`name (module)` of the definitions that begin so."""
    found = [
        f"{name} ({module})"
        for module, file in SOURCES.items()
        for name, pattern in patterns.items()
        if re.search(pattern, file.read_text(), re.MULTILINE)
    ]
    return sorted(found)


def stays() -> list[tuple[str, list[str]]]:
    """Each pass, and the rooms in which functions run while it does, in order."""
    import torch

    import cp_rewrite as cp
    from cp_rewrite import passes
    from tests.helpers.packed_model import TOKENS, PackedModel, packed_batch

    found: list[tuple[str, list[str]]] = []
    pipeline, before = [*passes.PIPELINE], passes.PIPELINE
    passes.PIPELINE = tuple(_watched(run, found) for run in pipeline)  # type: ignore[misc]
    change = passes.CHANGE
    passes.CHANGE = passes.PIPELINE[len(pipeline) - len(change) :]  # type: ignore[misc]
    try:
        torch._dynamo.reset()
        sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"))
        cp.check(PackedModel(), sharding, packed_batch())
    finally:
        passes.PIPELINE, passes.CHANGE = before, change  # type: ignore[misc]
    return found[: len(pipeline)]


def _watched(run: Callable[[Any], Any], found: list[tuple[str, list[str]]]) -> Callable[[Any], Any]:
    def watched(state: Any) -> Any:
        rooms: dict[str, None] = {}

        def note(frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and (room := _room(frame.f_code.co_filename)):
                rooms[room] = None

        outer = sys.getprofile()
        sys.setprofile(note)
        try:
            return run(state)
        finally:
            sys.setprofile(outer)
            found.append((run.__name__, [*rooms]))

    watched.__name__ = run.__name__
    return watched


@cache
def _room(file: str) -> str:
    """The folder of a file of the project, below the package; "" of others, of this one, of what plays ranks here."""
    path = Path(file).resolve()
    if not path.is_relative_to(ROOT) or path.is_relative_to(ROOT / "tests") or ".venv" in path.parts:
        return ""
    if path.is_relative_to(ROOT / "cp_rewrite" / "diagnose"):
        return ""
    return ".".join(part for part in path.relative_to(ROOT).parent.parts if part != "cp_rewrite")


def measures() -> list[tuple[str, str]]:
    """(measure, its value)."""
    graph = graph_of_imports()
    importers = Counter(other for others in graph.values() for other in others)
    read, chain, walk = read_for(READ, graph), longest_chain(graph), stays()
    visits = [room for _, rooms in walk for room in rooms]
    tests = [file for file in (ROOT / "tests").rglob("*.py")]
    names = defined(LENGTHS)
    return [
        ("source lines / files", f"{lines(SOURCES):,} / {len(SOURCES)}"),
        ("test lines / files", f"{sum(len(f.read_text().splitlines()) for f in tests):,} / {len(tests)}"),
        ("files imported from one place only", str(sum(n == 1 for n in importers.values()))),
        (f"to understand {READ}: files / lines", f"{len(read)} / {lines(read):,}"),
        ("longest chain of imports", str(len(chain))),
        (
            "a graph through the passes: stays / rooms / returns",
            f"{len(visits)} / {len({*visits})} / {len(visits) - len({*visits})}",
        ),
        ("words of the glossary", str(len(glossary()))),
        ("types and readers of a T + b", f"{len(names)}: {', '.join(names)}"),
    ]


if __name__ == "__main__":
    print("| measure | |\n|---|---|")
    for name, value in measures():
        print(f"| {name} | {value} |")
    if "-v" in sys.argv:
        print(
            "\n".join(["", *longest_chain(graph_of_imports()), "", *(f"{name}: {', '.join(r)}" for name, r in stays())])
        )
