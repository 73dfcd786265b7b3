"""All that the documents name is there: files, functions, fields, exchanges, layouts. test_pages.py runs their code."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

import cp_rewrite as cp
from cp_rewrite import passes
from cp_rewrite.planning.names import LAYOUTS, ExchangeName
from cp_rewrite.refusal import Reason
from tests.house import glossary
from tests.test_rooms import FLOORS, SOURCES, room_of

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def code_of(page: Path) -> list[str]:
    return re.findall(r"```python(?: title=[^\n]*)?\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    names = re.findall(r"`([\w./*]+/[\w.*]*\.(?:md|py|json|cu))`", text) + re.findall(r"\]\((?!http)([^)#]+)\)", text)
    for name in names:
        places = [name, f"docs/{name}", f"cp_rewrite/{name}", name.replace("NAME", "*")]
        assert any([*ROOT.glob(place)] for place in places) or (page.parent / name).exists(), (
            f"{page.name} names {name}"
        )


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call | None]]:
    """Each `cp.name` with its call, if it is called."""
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cp":
            yield node.attr, called.get(id(node))


def test_examples_name_what_there_is() -> None:
    known = {f.name for f in fields(cp.Sharding)}
    found: set[str] = set()
    for page in PAGES:
        for name, call in (pair for code in code_of(page) for pair in calls(ast.parse(code))):
            assert name in cp.__all__, f"{page.name} names cp.{name}"
            assert name != "Sharding" or call is None or {k.arg for k in call.keywords} <= known
            found.add(name)
    assert {"Sharding", "sum_gradients", "plan"} <= found


def test_usage_lists_every_exchange_and_layout() -> None:
    text = (ROOT / "docs" / "reference" / "usage.md").read_text()
    listed = {
        name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`([\w+]+)`", row)
    }
    assert {*get_args(ExchangeName), *LAYOUTS} <= listed


def test_the_header_of_passes_lists_the_pipeline() -> None:
    listed = re.findall(r"^    (\w+) +([\w/]+\.py) ", passes.__doc__ or "", re.MULTILINE)
    assert [name for name, _ in listed] == [run_pass.__name__ for run_pass in passes.PIPELINE]
    for _, file in listed:
        assert (ROOT / "passes" / file).exists(), file


def test_the_architecture_page_names_every_pass_and_room() -> None:
    text = (ROOT / "docs" / "internals" / "architecture.md").read_text()
    names = {run_pass.__name__ for run_pass in passes.PIPELINE}
    assert {name for name in names if f"`{name}`" not in text} == set()
    rooms = text[text.index("## Rooms") : text.index("## The path of a graph")]
    for room in (room for floor in FLOORS for room in floor if not room.startswith(("__", "csrc"))):
        assert f"`{room}`" in rooms or f"{room.replace('.', '/')}/`" in rooms or f"{room}.py`" in rooms, room


def test_the_glossary_is_short_and_tells_each_word_once() -> None:
    words = glossary()
    assert len(set(words)) == len(words) <= 50


def test_the_glossary_names_each_type_that_four_rooms_import() -> None:
    readers = defaultdict[str, set[str]](set)
    for module, file in SOURCES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    readers[alias.name].add(room_of(module))
    shared = {name for name in classes() if len(readers[name]) >= 4}
    table = (ROOT / "docs" / "internals" / "architecture.md").read_text().partition("## Glossary")[2]
    assert "Sharding" in shared
    assert {name for name in shared if f"`{name}`" not in table} == set()


def test_no_class_outside_of_passes_shares_its_name() -> None:
    shared = {name: modules for name, modules in classes().items() if len(modules) > 1}
    others = {name for name, modules in shared.items() if not all(module.startswith("passes.") for module in modules)}
    assert others <= {"Runs", "Trace"}, shared


def classes() -> dict[str, list[str]]:
    """Class of the source -> the modules that define it."""
    found = defaultdict[str, list[str]](list)
    for module, file in SOURCES.items():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    return found


def test_contributing_names_the_tables_that_there_are() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for line in re.findall(r"^\| an? [^|]+\| (.+) \|$", text, re.MULTILINE):
        for name in re.findall(r"`([\w./]+\.py)`", line):
            assert "NAME" in name or (ROOT / name).exists(), name


def test_every_reason_has_advice() -> None:
    headings = re.findall(r"^## ([A-Z_]+)$", (ROOT / "docs" / "refusals.md").read_text(), re.MULTILINE)
    assert headings == [reason.name for reason in Reason]


def test_readme_is_short_and_counts_the_models_as_the_table_does() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 650
    table = (ROOT / "docs" / "generated" / "models.md").read_text()
    table = table[table.index("## All text models") :]
    outcomes = re.findall(r"^\| \w+ \| \w+ \| [^|]+ \| (right|refused|torch)", table, re.MULTILINE)
    counts = re.findall(r"^\| [a-z ,]+ \| (\d+) \| (\d+) \| (\d+) \|$", table, re.MULTILINE)
    totals = [sum(map(int, column)) for column in zip(*counts, strict=True)]
    assert [outcomes.count(verdict) for verdict in ("right", "refused", "torch")] == totals
    right, of = outcomes.count("right"), len(outcomes)
    assert f"{right} of {of} text classes" in text, f"docs/generated/models.md has {right} of {of}"


def test_questions_are_two_clicks_from_readme() -> None:
    assert "(docs/questions.md)" in (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (.+\?) \| (.+) \|$", (ROOT / "docs" / "questions.md").read_text(), re.MULTILINE)
    assert len(rows) == 20
    for question, answer in rows:
        assert re.search(r"\]\([\w/]+\.md(#\w+)?\)|`make demo`|table of README", answer), question
