"""A graph as short normalised text: for diffs people read, expected outputs in tests, and a hash equal on all ranks."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable
from typing import Any

import torch.fx as fx
from torch import SymInt, Tensor

from .dynamo import is_of_module, source_of
from .nodes import attribute_of


def graph_lines(gm: fx.GraphModule) -> list[str]:
    """One line per node, `name: dtype[shape] = target(args)`, nested regions indented below the node that calls them.

    Symbols are numbered in order of appearance, group names become 'cp', device indices and parameters are left out.
    """
    symbols: dict[str, str] = {}
    return [normal_line(line, symbols) for line in _lines(gm, "")]


def graph_diff(before: list[str], after: list[str]) -> str:
    """Unified diff of two graphs. A hunk that repeats an earlier one up to numbers (another layer) is counted only."""
    hunks = _hunks(difflib.unified_diff(before, after, "before", "after", n=1, lineterm=""))
    seen: dict[str, int] = {}
    shown: dict[str, list[str]] = {}
    for hunk in map(_fold_inputs, hunks):
        shape = re.sub(r"_\d+\b|\d+", "", "\n".join(hunk))
        seen[shape] = seen.get(shape, 0) + 1
        shown.setdefault(shape, hunk)
    lines: list[str] = []
    for shape, hunk in shown.items():
        lines += ["@@", *hunk]
        if seen[shape] > 1:
            lines.append(f"@@ and {seen[shape] - 1} more like this")
    return "\n".join(["--- before", "+++ after", *lines]) if lines else "no change"


_INPUTS = re.compile(r"cp_\w+_(\d+)(?:, cp_\w+_\1)+")


def _fold_inputs(hunk: list[str]) -> list[str]:
    """The plan's inputs are many and alike: a run of them is one line, or one argument `cp_*_0`."""
    lines: list[str] = []
    for added, group in itertools.groupby(hunk, lambda line: line.startswith("+cp_") and line.endswith("placeholder")):
        block = list(group)
        names = [line[1:].split(":")[0] for line in block]
        lines += [f"+{names[0]} .. {names[-1]} = {len(block)} plan inputs"] if added else block
    return [_INPUTS.sub(r"cp_*_\1", line) for line in lines]


def _hunks(diff: Iterable[str]) -> list[list[str]]:
    hunks: list[list[str]] = []
    for line in diff:
        if line.startswith("@@"):
            hunks.append([])
        elif hunks:
            hunks[-1].append(line)
    return hunks


def _lines(gm: fx.GraphModule, indent: str) -> Iterable[str]:
    for node in gm.graph.nodes:
        if node.op == "placeholder" and _is_parameter(node):
            continue
        yield indent + _line(node)
        if node.op == "get_attr" and isinstance(body := attribute_of(node), fx.GraphModule):
            yield from _lines(body, indent + "    ")


def _line(node: fx.Node) -> str:
    head = f"{_name(node)}{_type(node)}"
    if node.op in ("placeholder", "get_attr"):
        return f"{head} = {node.op}"
    args = [_text(arg) for arg in node.args] + [f"{key}={_text(value)}" for key, value in node.kwargs.items()]
    if node.op == "output":
        return f"return {', '.join(args)}"
    if node.op == "call_method":
        return f"{head} = {args[0]}.{node.target}({', '.join(args[1:])})"
    return f"{head} = {target_name(node.target)}({', '.join(args)})"


def _name(node: fx.Node) -> str:
    """A node's name; of a size that is an input its symbol, for on a rank the row's name for it is no more true."""
    value = node.meta.get("example_value")
    return str(value) if node.op == "placeholder" and isinstance(value, SymInt) else node.name


def _type(node: fx.Node) -> str:
    value = node.meta.get("example_value")
    if isinstance(value, Tensor):
        return f": {str(value.dtype).removeprefix('torch.')}[{', '.join(str(size) for size in value.shape)}]"
    return f": Sym({value})" if isinstance(value, SymInt) else ""


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return _name(value)
    if isinstance(value, list | tuple):
        inner = ", ".join(_text(v) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, slice):
        parts = ["" if part is None else _text(part) for part in (value.start, value.stop, value.step)]
        return ":".join(parts if value.step is not None else parts[:2])
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def target_name(target: Any) -> str:
    """Name of what a node calls: of an op with its overload, unless that is the default; of a function, of a method."""
    name = (
        str(target) if not callable(target) or hasattr(target, "_schema") else getattr(target, "__name__", str(target))
    )
    return name.removesuffix(".default")


def _is_parameter(node: fx.Node) -> bool:
    source = source_of(node)
    return "l_self_" in str(node.target).lower() if source is None else is_of_module(source)


_SYMBOL = re.compile(r"\b[su]\d+\b")


def normal_line(line: str, symbols: dict[str, str]) -> str:
    """A line without what differs between equal graphs; `symbols` collects the names given so far."""
    for symbol in _SYMBOL.findall(line):
        symbols.setdefault(symbol, f"S{len(symbols)}")
    line = _SYMBOL.sub(lambda match: symbols[match.group()], line)
    # Groups are counters or hashes, and every rank has a device of its own.
    line = re.sub(r"'(\d+|[0-9a-f]{16,})'", "'cp'", line)
    return re.sub(r", index=\d+(?=\))|(?<=cuda):\d+", "", line)
