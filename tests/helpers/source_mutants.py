"""Changes of one token: where a source file has room for one."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Place = tuple[int, int]
OPERATORS: dict[type[ast.AST], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")), ast.LtE: ("<=", ("<",)), ast.Gt: (">", (">=", "<")), ast.GtE: (">=", (">",)),
    ast.Eq: ("==", ("!=",)), ast.NotEq: ("!=", ("==",)), ast.In: ("in", ("not in",)), ast.Is: ("is", ("is not",)),
    ast.NotIn: ("not", ("",)), ast.IsNot: ("is", ("is",)),
    ast.Add: ("+", ("-",)), ast.Sub: ("-", ("+",)), ast.Mult: ("*", ("//",)), ast.FloorDiv: ("//", ("*",)),
    ast.Mod: ("%", ("//",)), ast.BitAnd: ("&", ("|",)), ast.BitOr: ("|", ("&",)),
    ast.And: ("and", ("or",)), ast.Or: ("or", ("and",)),
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
SIDES = {"left": "right", "right": "left"}
QUIET_CALLS = {"isinstance", "issubclass", "TypeVar", "cast", "field", "NewType"}
QUIET_KEYWORDS = {"strict", "stacklevel"}
"""Calls, and keyword arguments, that change no result where nothing is wrong."""


@dataclass(frozen=True)
class Mutant:
    """`before` at (line, column) of `file` becomes `after`. source: the line as it becomes."""

    room: str
    file: str
    line: int
    column: int
    before: str
    after: str
    source: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.before} -> {self.after or 'nothing'}"

    def applied(self, text: str) -> str:
        """The file with the change."""
        lines = text.splitlines(keepends=True)
        lines[self.line - 1] = changed(lines[self.line - 1], self.column, self.before, self.after)
        return "".join(lines)


def changed(line: str, column: int, before: str, after: str) -> str:
    assert line[column:].startswith(before)
    return line[:column] + after + line[column + len(before) :]


def mutants_of(room: str, file: str, text: str) -> Iterator[Mutant]:
    """All of one file, in its order."""
    lines = text.splitlines()
    for (line, column), before, after in sorted(set(_Finder(text).changes())):
        yield Mutant(room, file, line, column, before, after, changed(lines[line - 1], column, before, after).strip())


class _Finder:
    """Finds changes in one file. Annotations, messages, decorators, imports and asserts are left alone."""

    def __init__(self, text: str) -> None:
        self.tree, self.lines = ast.parse(text), text.splitlines()
        kinds = (tokenize.OP, tokenize.NAME)
        self.tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type in kinds]

    def changes(self) -> Iterator[tuple[Place, str, str]]:
        yield from self._visit(self.tree, ())

    def _visit(self, node: ast.AST, arguments: tuple[str, ...]) -> Iterator[tuple[Place, str, str]]:
        if isinstance(node, ast.FunctionDef):
            arguments = tuple(argument.arg for argument in node.args.args if argument.arg not in ("self", "cls", "ctx"))
        yield from self._here(node, arguments)
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _quiet(node, name, child):
                    yield from self._visit(child, arguments)

    def _here(self, node: Any, arguments: tuple[str, ...]) -> Iterator[tuple[Place, str, str]]:
        match node:
            case ast.Compare():
                sides = [node.left, *node.comparators]
                for left, op, right in zip(sides[:-1], node.ops, sides[1:], strict=True):
                    yield from self._operator(op, left, right)
            case ast.BinOp():
                yield from self._operator(node.op, node.left, node.right)
            case ast.AugAssign(op=ast.Add() | ast.Sub() | ast.BitAnd() | ast.BitOr()):
                before, (after,) = OPERATORS[type(node.op)]
                yield self._token(node.target, node.value, f"{before}=")[0], f"{before}=", f"{after}="
            case ast.BoolOp():
                for left, right in zip(node.values, node.values[1:], strict=False):
                    yield from self._operator(node.op, left, right)
            case ast.UnaryOp(op=ast.Not()):
                yield self._start(node), "not ", ""
            case ast.UnaryOp(op=ast.USub()) if not isinstance(node.operand, ast.Constant):
                yield self._start(node), "-", ""
            case ast.Constant():
                yield from self._constant(node)
            case ast.Name() if node.id in NAMES:
                yield self._start(node), node.id, NAMES[node.id]
            case ast.Attribute() if node.attr in NAMES:
                line, column = self._end(node)
                yield (line, column - len(node.attr)), node.attr, NAMES[node.attr]
            case ast.Return(value=ast.Name(id=name)) if name in arguments:
                for other in arguments:
                    if other != name:
                        yield self._start(node.value), name, other
            case _:
                pass

    def _operator(self, op: ast.AST, left: ast.AST, right: ast.AST) -> Iterator[tuple[Place, str, str]]:
        if type(op) not in OPERATORS:
            return
        first, afters = OPERATORS[type(op)]
        start, end = self._token(left, right, first)
        before = first
        if isinstance(op, ast.NotIn):  # `not in` -> `in`: `not ` goes
            before = "not "
        elif isinstance(op, ast.IsNot):
            before = self.lines[start[0] - 1][start[1] : end[1] + len(" not")]
        if before.split() != (["is", "not"] if isinstance(op, ast.IsNot) else first.split()):
            return
        for after in afters:
            yield start, before, after

    def _constant(self, node: ast.Constant) -> Iterator[tuple[Place, str, str]]:
        (line, column), (_, end) = self._start(node), self._end(node)
        before = self.lines[line - 1][column:end]
        match node.value:
            case bool():
                yield (line, column), before, str(not node.value)
            case int() if before.isdigit():
                yield (line, column), before, str(node.value + 1)
                if node.value > 0:
                    yield (line, column), before, str(node.value - 1)
            case str() if node.value in SIDES:
                yield (line, column), before, f'"{SIDES[node.value]}"'
            case _:
                pass

    def _token(self, left: Any, right: Any, text: str) -> tuple[Place, Place]:
        """(start, end) of the operator between two operands."""
        after, before = self._end(left), self._start(right)
        return next((t.start, t.end) for t in self.tokens if after <= t.start < before and t.string == text)

    def _start(self, node: Any) -> Place:
        return node.lineno, self._characters(node.lineno, node.col_offset)

    def _end(self, node: Any) -> Place:
        return node.end_lineno, self._characters(node.end_lineno, node.end_col_offset)

    def _characters(self, line: int, size: int) -> int:
        """ast counts bytes, tokenize characters."""
        return len(self.lines[line - 1].encode()[:size].decode())


def _quiet(node: ast.AST, name: str, child: ast.AST) -> bool:
    """True if `child`, in the field `name` of `node`, computes nothing: it gets no mutants."""
    if name in ("annotation", "returns", "decorator_list", "bases", "slice") and not isinstance(node, ast.Subscript):
        return True
    if isinstance(child, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
        return True
    if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id in QUIET_CALLS:
        return True
    if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
        return True
    if isinstance(child, ast.keyword) and child.arg in QUIET_KEYWORDS:
        return True
    if isinstance(child, ast.FunctionDef) and any(isinstance(n, ast.Name) and n.id == "cuda" for n in ast.walk(child)):
        return True  # it launches a CUDA kernel
    # At module level: docstrings, names of types, versions.
    return isinstance(node, ast.Module) and isinstance(child, ast.Assign | ast.Expr)
