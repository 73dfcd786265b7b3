"""The rooms of the source, and the one direction in which they import each other."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent

FLOORS = (
    {"arguments", "csrc", "refusal", "torch_internals"},
    {"capacity"},
    {"documents"},
    {"masks", "packing"},
    {"planning"},
    {"sharding"},
    {"kernels"},
    {"ops"},
    {"experts"},
    {"agree"},
    {"batch"},
    {"passes.graph"},
    {"passes.values"},
    {"passes.capture"},
    {"passes.predicate"},
    {"passes.locality"},
    {"passes.match"},
    {"passes"},
    {"calls"},
    {"segments"},
    {"diagnose"},
    {"entry"},
    {"integrations"},
    {"public"},
    {"__init__"},
    {"__main__"},
)
"""From the ground up: a room imports from rooms below it. Files of the root are rooms of their own."""


def sources() -> dict[str, Path]:
    """Module -> file, without the package's own name: `passes.match.flex`."""
    files = [*(ROOT / "passes").rglob("*.py"), *(ROOT / "csrc").rglob("*.py")]
    files += [f for f in (ROOT / "cp_rewrite").rglob("*.py") if not any(parent.is_symlink() for parent in f.parents)]
    found: dict[str, Path] = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[1:] if parts[0] == "cp_rewrite" else parts)] = file
    return found


SOURCES = sources()


def module_of(dotted: str, name: str) -> str | None:
    """The module that `from dotted import name` reads; None: one of another package."""
    if dotted != "cp_rewrite" and not dotted.startswith("cp_rewrite."):
        return None
    path = dotted.removeprefix("cp_rewrite").removeprefix(".")
    prefix = f"{path}." if path else ""
    candidates = (f"{prefix}{name}", f"{prefix}{name}.__init__", path, f"{prefix}__init__")
    return next(candidate for candidate in candidates if candidate in SOURCES)


def imports(module: str) -> list[tuple[str, bool]]:
    """(module, is it inside a function or TYPE_CHECKING) of everything that a module of ours imports from ours."""
    found: list[tuple[str, bool]] = []
    folder = ("cp_rewrite." + module).rpartition(".")[0]
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level < 2, f"{module}: other rooms are imported by their whole name"
            source = f"{folder}.{node.module}" if node.module and node.level else node.module or folder
            names = (module_of(source, alias.name) for alias in node.names)
            found += [(name, node.col_offset > 0) for name in names if name is not None]
    return found


def room_of(module: str) -> str:
    """The deepest room that holds a module."""
    rooms = {room for floor in FLOORS for room in floor}
    path = module
    while path not in rooms:
        assert "." in path, f"{module} is in no room: put it into FLOORS"
        path = path.rpartition(".")[0]
    return path


def test_rooms_import_from_rooms_below() -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    wrong = [
        f"{module} imports {other}"
        for module in SOURCES
        for other, late in imports(module)
        if not late and room_of(other) != room_of(module) and floor[room_of(other)] >= floor[room_of(module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_files_import_each_other_in_no_circle() -> None:
    graph = {module: {other for other, late in imports(module) if not late} - {module} for module in SOURCES}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_late_imports_have_a_reason() -> None:
    """An import inside a function or under TYPE_CHECKING says in a comment beside it why it is late."""
    bare: list[str] = []
    for module, file in SOURCES.items():
        lines = file.read_text().split("\n")
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.Import | ast.ImportFrom) and node.col_offset:
                beside = lines[node.lineno - 2] + lines[node.lineno - 1]
                before = lines[node.lineno - 2].strip()
                if "#" not in beside and not before.startswith(("import ", "from ")):
                    bare.append(f"{module}:{node.lineno} {lines[node.lineno - 1].strip()}")
    assert not bare, "\n".join(bare)
