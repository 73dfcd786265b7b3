"""What nodes compute of chunks of tokens: which of them do the same with each chunk, and where chunks meet.

x, y = h.chunk(2, dim=1)
s = head(x).sum() + head(y).sum()        keys: chunk, head, sum; `s` is the end of the last
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.nodes import op_name
from cp_rewrite.passes.graph.regions import nested_graphs, region_call
from cp_rewrite.passes.graph.writes import memory_of, writers_between, written_nodes
from cp_rewrite.torch_internals import expression

from .join_regions import Bodies, NotAlike, check_alone

TURNED = frozenset("getattr t transpose permute to float double bfloat16 half detach contiguous".split())


@dataclass(frozen=True)
class OfChunk:
    """What a node computes of chunk `number`: by the same `key` as others do of theirs."""

    key: int
    number: int
    sizes: tuple[Any, ...]


@dataclass(frozen=True)
class End:
    """Where chunks meet: the nodes that add them up or join them give what `last` gives.

    keys: of what is added up. others: terms beside the chunks'; None: chunks are joined along their dim.
    """

    keys: tuple[int, ...]
    last: fx.Node
    nodes: tuple[fx.Node, ...]
    others: tuple[Any, ...] | None


@dataclass
class Chunks:
    """Nodes by what they compute of chunks.

    cuts: nodes that cut into chunks -> along which dim. symbols: of the number of tokens -> one of them, since they
    will be one.
    """

    cuts: dict[fx.Node, int]
    symbols: dict[Any, Any]
    parts: dict[fx.Node, OfChunk] = field(default_factory=dict)
    keys: dict[Any, int] = field(default_factory=dict)
    members: dict[int, list[fx.Node]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    firsts: dict[Any, fx.Node] = field(default_factory=dict)
    bodies: Bodies = field(default_factory=Bodies)

    def visit(self, node: fx.Node) -> None:
        source: Any = node.args[0] if node.args else None
        if node.target is operator.getitem and source in self.cuts:
            chunks: Sequence[Tensor] = source.meta["example_value"]
            sizes = tuple(expression(x.shape[self.cuts[source]]).subs(self.symbols) for x in chunks)
            return self._add(node, ("cut", source), node.args[1], sizes)  # type: ignore[arg-type]
        parts = [self.parts[n] for n in node.all_input_nodes if n in self.parts]
        if len({(part.number, part.sizes) for part in parts}) != 1 or node.op not in ("call_function", "call_method"):
            return
        if any(self._has_all(n) for n in node.all_input_nodes if n not in self.parts):
            raise NotAlike
        if written_nodes(node) and op_name(node) != "add":
            raise NotAlike
        check_alone(node, [n for n in node.all_input_nodes if n in self.parts])
        args: Any = node.args
        if (call := region_call(node)) is not None:
            read = [given for inside, given in call.filled.items() if inside.users]  # a chunk's own sizes may not be
            args = (self.bodies.number(call.body), *read)
        elif nested_graphs(node):
            raise NotAlike
        key = (node.op, node.target, self._pattern(args), self._pattern(node.kwargs))
        self._add(node, key, parts[0].number, parts[0].sizes)

    def _has_all(self, node: fx.Node) -> bool:
        """Whether a node's tensor has a dim of all tokens."""
        value = node.meta.get("example_value")
        symbols = {symbol for count in self.symbols for symbol in count.free_symbols}
        return isinstance(value, Tensor) and any(expression(n).free_symbols & symbols for n in value.shape)

    def _add(self, node: fx.Node, what: Any, number: int, sizes: tuple[Any, ...]) -> None:
        key = self.keys.setdefault(what, len(self.keys))
        self.parts[node] = OfChunk(key, number, sizes)
        self.members.setdefault(key, []).append(node)
        self.counts[key] = len(sizes)

    def _pattern(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("part", self.parts[value].key) if value in self.parts else self._first(value)
        if isinstance(value, list | tuple):
            return (type(value).__name__, *map(self._pattern, value))
        if isinstance(value, dict):
            return tuple((name, self._pattern(x)) for name, x in sorted(value.items()))
        if isinstance(value, slice):
            return ("slice", *map(self._pattern, (value.start, value.stop, value.step)))
        return type(value).__name__, value

    def _first(self, node: fx.Node) -> fx.Node:
        """The first node that gives what this one gives: `x @ weight.T` turns the weight once more for each chunk."""
        if op_name(node) not in TURNED:
            return node
        key = (node.op, node.target, self._pattern(node.args), self._pattern(node.kwargs))
        first = self.firsts.setdefault(key, node)
        return node if first is not node and writers_between(node.all_input_nodes, first, node) else first

    @property
    def whole(self) -> list[int]:
        """Keys of what is computed of all chunks, once of each."""
        return [
            key
            for key, nodes in self.members.items()
            if sorted(self.parts[n].number for n in nodes) == list(range(self.counts[key]))
        ]

    def ends(self) -> list[End]:
        """Raises NotAlike where something else reads chunks."""
        whole = {*self.whole}
        if not all(self.keys.get(("cut", cut)) in whole for cut in self.cuts):
            raise NotAlike
        found: list[End] = []
        adds: dict[fx.Node, None] = {}
        for key in whole:
            readers = {
                user: None
                for node in self.members[key]
                for user in node.users
                if (user not in self.parts or self.parts[user].key not in whole) and not is_dead(user)
            }
            if all(op_name(n) == "add" and len(n.args) == 2 and not n.kwargs for n in readers):
                adds |= readers
            else:
                found.append(self._end(key, [*readers]))
        found += [self._sum_of(n, adds, whole) for n in adds if not any(user in adds for user in n.users)]
        if not found:
            raise NotAlike
        return found

    def _end(self, key: int, readers: Sequence[fx.Node]) -> End:
        """Where chunks are joined again, or stacked and summed."""
        members = sorted(self.members[key], key=lambda n: self.parts[n].number)
        if len(readers) == 1 and op_name(readers[0]) in ("cat", "concat"):
            given = readers[0].args[0] if readers[0].args else None
            if list(given or ()) != members:  # type: ignore[arg-type]
                raise NotAlike
            return End((key,), readers[0], (readers[0],), None)
        if len(readers) == 1 and op_name(readers[0]) == "stack":
            stack = readers[0]
            sums = [user for user in stack.users if op_name(user) == "sum" and len(user.args) == 1 and not user.kwargs]
            given = stack.args[0] if stack.args else ()
            if len(sums) != 1 or len(stack.users) != 1 or sorted(given, key=members.index) != members:  # type: ignore[arg-type]
                raise NotAlike
            if any(n.meta["example_value"].ndim for n in members):
                raise NotAlike
            return End((key,), sums[0], (stack, sums[0]), ())
        raise NotAlike

    def _sum_of(self, last: fx.Node, adds: Collection[fx.Node], whole: Collection[int]) -> End:
        """The end of a loop that adds its chunks' terms up one by one."""
        nodes, terms = list[fx.Node](), list[Any]()
        pending: list[Any] = [last]
        while pending:
            term = pending.pop()
            if isinstance(term, fx.Node) and term in adds:
                nodes.append(term)
                pending += reversed(term.args)
            else:
                terms.append(term)
        if any(len(n.users) != 1 for n in nodes[1:]):
            raise NotAlike
        of_chunks = [t for t in terms if isinstance(t, fx.Node) and t in self.parts and self.parts[t].key in whole]
        keys = tuple(dict.fromkeys(self.parts[t].key for t in of_chunks))
        if Counter(of_chunks) != Counter(n for key in keys for n in self.members[key]):
            raise NotAlike
        others = tuple(term for term in terms if term not in of_chunks)
        if any(written_nodes(n) for n in nodes) and any(_is_shared(term, last, nodes) for term in others):
            raise NotAlike
        return End(keys, last, tuple(nodes), others)


def _is_shared(total: Any, last: fx.Node, adds: Collection[fx.Node]) -> bool:
    """Whether something else reads what chunks' terms are written into, up to the `last` of these writes or later."""
    if not isinstance(total, fx.Node):
        return False
    nodes = [*total.graph.nodes]
    before = nodes[: nodes.index(last)]
    views = any(memory_of(n) == memory_of(total) for n in before if n is not total and n not in adds)
    return total.op in ("placeholder", "get_attr") or len(total.users) > 1 or views


def is_dead(node: fx.Node) -> bool:
    return not node.users and node.op in ("call_function", "call_method") and not written_nodes(node)
