"""Loops over chunks of tokens that treat all chunks alike, as one run over all of them.

    for x, y in zip(logits.chunk(8, dim=1), labels.chunk(8, dim=1)):
        total = total + cross_entropy(x, y, reduction="sum")          ->     cross_entropy(logits, labels, …)

Both are the same where every joined node gives rows, each made of its own token, and those that are added up give sums
over tokens. Joined nodes, also of nested regions (`join_regions.py`), are marked for the locality check, which proves
that or refuses them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.modes import modes_of
from cp_rewrite.passes.graph.new_nodes import place_by
from cp_rewrite.passes.graph.nodes import bind, op_name
from cp_rewrite.passes.graph.regions import nested_graphs, region_call
from cp_rewrite.passes.graph.writes import writers_between, written_nodes
from cp_rewrite.torch_internals import FakeTensorMode, expression, fake_mode_of

from .join_regions import CHUNKS, JOINED, Bodies, NotAlike, call_on_all, check_alone

CUTS = ("chunk", "split", "tensor_split")
_TURNED = frozenset("getattr t transpose permute to float double bfloat16 half detach contiguous".split())


def join_chunks(gm: fx.GraphModule, counts: Collection[Any], kept: Collection[fx.Node]) -> bool:
    """Join such loops of a graph; returns whether there were any.

    Args:
        counts: the number of tokens, in as many symbols as there are. kept: nodes that are read beside the graph.
    """
    cuts = {node: dim for node in gm.graph.nodes if (dim := _cut_dim(node, counts)) is not None}
    mode = fake_mode_of(gm.graph.nodes)
    if not cuts or mode is None:
        return False
    chunks = _Chunks(cuts, dict.fromkeys(counts, next(iter(counts))))
    try:
        for node in gm.graph.nodes:
            chunks.visit(node)
        ends = chunks.ends()
    except (NotAlike, TypeError):
        return False
    gone = {*cuts, *(n for key in chunks.whole for n in chunks.members[key]), *(n for end in ends for n in end.nodes)}
    return not gone & {*kept} and _Joiner(gm.graph, chunks, mode).join(ends, gone)


@dataclass(frozen=True)
class _Part:
    """What a node computes of chunk `number`: by the same `key` as others do of theirs."""

    key: int
    number: int
    sizes: tuple[Any, ...]


@dataclass(frozen=True)
class _End:
    """Where chunks meet: the nodes that add them up or join them give what `last` gives.

    others: terms beside the chunks'; None: chunks are joined along their dim.
    """

    key: int
    last: fx.Node
    nodes: tuple[fx.Node, ...]
    others: tuple[Any, ...] | None


@dataclass
class _Chunks:
    """Nodes by what they compute of chunks.

    cuts: nodes that cut into chunks -> along which dim. symbols: of the number of tokens -> one of them, since they
    will be one.
    """

    cuts: dict[fx.Node, int]
    symbols: dict[Any, Any]
    parts: dict[fx.Node, _Part] = field(default_factory=dict)
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
        if written_nodes(node) and op_name(node) != "add":
            raise NotAlike
        check_alone(node, [n for n in node.all_input_nodes if n in self.parts])
        args: Any = node.args
        if (call := region_call(node)) is not None:
            args = (self.bodies.number(call.body), *call.operands)
        elif nested_graphs(node):
            raise NotAlike
        key = (node.op, node.target, self._pattern(args), self._pattern(node.kwargs))
        self._add(node, key, parts[0].number, parts[0].sizes)

    def _add(self, node: fx.Node, what: Any, number: int, sizes: tuple[Any, ...]) -> None:
        key = self.keys.setdefault(what, len(self.keys))
        self.parts[node] = _Part(key, number, sizes)
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
        if op_name(node) not in _TURNED:
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

    def ends(self) -> list[_End]:
        """Raises NotAlike where something else reads chunks."""
        whole = {*self.whole}
        if not all(self.keys.get(("cut", cut)) in whole for cut in self.cuts):
            raise NotAlike
        found: list[_End] = []
        for key in whole:
            readers = {
                user: None
                for node in self.members[key]
                for user in node.users
                if (user not in self.parts or self.parts[user].key not in whole) and not _is_dead(user)
            }
            found += [self._end(key, [*readers])] if readers else []
        if not found:
            raise NotAlike
        return found

    def _end(self, key: int, readers: Sequence[fx.Node]) -> _End:
        members = sorted(self.members[key], key=lambda n: self.parts[n].number)
        if len(readers) == 1 and op_name(readers[0]) in ("cat", "concat"):
            given = readers[0].args[0] if readers[0].args else None
            if list(given or ()) != members:  # type: ignore[arg-type]
                raise NotAlike
            return _End(key, readers[0], (readers[0],), None)
        if len(readers) == 1 and op_name(readers[0]) == "stack":
            stack = readers[0]
            sums = [user for user in stack.users if op_name(user) == "sum" and len(user.args) == 1 and not user.kwargs]
            given = stack.args[0] if stack.args else ()
            if len(sums) != 1 or len(stack.users) != 1 or sorted(given, key=members.index) != members:  # type: ignore[arg-type]
                raise NotAlike
            if any(n.meta["example_value"].ndim for n in members):
                raise NotAlike
            return _End(key, sums[0], (stack, sums[0]), ())
        return _sum_of(key, members, readers)


def _sum_of(key: int, members: Sequence[fx.Node], readers: Sequence[fx.Node]) -> _End:
    """The end of a loop that adds its chunks' terms up one by one."""
    nodes = [*readers]
    if any(op_name(n) != "add" or len(n.args) != 2 or n.kwargs for n in nodes):
        raise NotAlike
    last = [n for n in nodes if not any(user in nodes for user in n.users)]
    if len(last) != 1 or any(len(n.users) != 1 for n in nodes if n is not last[0]):
        raise NotAlike
    terms: list[Any] = []
    pending: list[Any] = [last[0]]
    while pending:
        term = pending.pop()
        if isinstance(term, fx.Node) and term in nodes:
            pending += reversed(term.args)
        else:
            terms.append(term)
    others = [term for term in terms if term not in members]
    if sorted((t for t in terms if t in members), key=members.index) != [*members]:
        raise NotAlike
    written = any(written_nodes(n) for n in nodes)
    if written and any(isinstance(term, fx.Node) and len(term.users) > 1 for term in others):
        raise NotAlike
    return _End(key, last[0], tuple(nodes), tuple(others))


@dataclass
class _Joiner:
    graph: fx.Graph
    chunks: _Chunks
    mode: FakeTensorMode

    def join(self, ends: Sequence[_End], gone: set[fx.Node]) -> bool:
        """Change the graph; False: it can't be, and is as it was."""
        made: list[fx.Node] = []
        try:
            joined = self._joined(made)
            results = [self._result(end, joined, made) for end in ends]
        except Exception:  # the nodes can't run on all chunks at once
            for node in reversed(made):
                self.graph.erase_node(node)
            self.drop_bodies()
            return False
        for end, result in zip(ends, results, strict=True):
            end.last.replace_all_uses_with(result)
        gone |= {n for n in self.graph.nodes if _is_dead(n) and any(x in gone for x in n.all_input_nodes)}
        gone |= {n for n in self.graph.nodes if n.op == "get_attr" or op_name(n) in _TURNED}
        for node in reversed([n for n in self.graph.nodes if n in gone]):
            if not node.users:
                self.graph.erase_node(node)
        self.drop_bodies()
        return True

    def drop_bodies(self) -> None:
        """Let go of bodies of regions that nothing calls any more."""
        root = self.graph.owning_module
        read = {str(node.target).partition(".")[0] for node in self.graph.nodes if node.op == "get_attr"}
        for name, body in [*root.named_children()]:
            if isinstance(body, fx.GraphModule) and name not in read:
                delattr(root, name)

    def _joined(self, made: list[fx.Node]) -> dict[int, fx.Node]:
        """What runs on all chunks, by key."""
        found: dict[int, fx.Node] = {self.chunks.keys["cut", cut]: cut.args[0] for cut in self.chunks.cuts}  # type: ignore[misc]
        places = {node: place for place, node in enumerate(self.graph.nodes)}
        firsts = [min(self.chunks.members[key], key=places.__getitem__) for key in self.chunks.whole]
        nodes = [n for key in self.chunks.whole for n in self.chunks.members[key]]
        between = [*self.graph.nodes][min(map(places.__getitem__, nodes)) : max(map(places.__getitem__, nodes))]
        modes = modes_of(self.graph)
        if any(modes[n] != modes[between[0]] for n in between):
            raise NotAlike
        for first in sorted(firsts, key=places.__getitem__):
            key = self.chunks.parts[first].key
            if key in found:
                continue

            def whole(n: fx.Node) -> fx.Node:
                return found[self.chunks.parts[n].key] if n in self.chunks.parts else n

            args, kwargs = fx.map_arg((first.args, first.kwargs), whole)
            if (call := region_call(first)) is not None:
                operands = args[-len(call.operands) :]
                of_chunk = [x in self.chunks.parts for x in call.operands]
                found[key] = call_on_all(call, operands, of_chunk, first, self.mode, self.chunks.counts[key])
                made += [found[key].args[0], found[key]]  # type: ignore[list-item]
                continue
            with self.graph.inserting_before(first):
                target: Any = first.target
                new = self.graph.create_node(first.op, target, args, kwargs)
            found[key] = self._ran(new, first, made)
            if isinstance(new.meta["example_value"], Tensor):
                new.meta |= {JOINED: "rows", CHUNKS: self.chunks.counts[key]}
        return found

    def _result(self, end: _End, joined: dict[int, fx.Node], made: list[fx.Node]) -> fx.Node:
        result = joined[end.key]
        old: Tensor = end.last.meta["example_value"]
        if end.others is None:
            new: Tensor = result.meta["example_value"]
            if [*map(expression, old.shape)] != [*map(expression, new.shape)] or old.dtype != new.dtype:
                raise NotAlike
            return result
        if JOINED not in result.meta:
            raise NotAlike
        result.meta[JOINED] = "sum"
        for other in end.others:
            with self.graph.inserting_before(end.last):
                new_sum = self.graph.call_function(operator.add, (other, result))
            result = self._ran(new_sum, end.last, made)
        return result

    def _ran(self, new: fx.Node, like: fx.Node, made: list[fx.Node]) -> fx.Node:
        """A new node with the place in the source of one like it."""
        made.append(new)
        place_by(new, like, self.mode)
        return new


def _cut_dim(node: fx.Node, counts: Collection[Any]) -> int | None:
    """The dim along which a node cuts tokens into chunks; None of other nodes."""
    if op_name(node) not in CUTS or not isinstance(node.args[0], fx.Node):
        return None
    dim = bind(node, ("input", "sections", "dim"), dim=0)["dim"]
    source = node.args[0].meta.get("example_value")
    if not isinstance(source, Tensor) or not isinstance(dim, int):
        return None
    dim %= source.ndim
    size = expression(source.shape[dim])
    counted = any(size.free_symbols & n.free_symbols or (n.is_Integer and size % n == 0) for n in counts)
    return dim if counted and len(node.meta["example_value"]) > 1 else None


def _is_dead(node: fx.Node) -> bool:
    return not node.users and node.op in ("call_function", "call_method") and not written_nodes(node)
