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
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
from torch import Tensor

from cp_rewrite.passes.graph.modes import modes_of
from cp_rewrite.passes.graph.new_nodes import place_by
from cp_rewrite.passes.graph.nodes import bind, op_name
from cp_rewrite.passes.graph.regions import region_call
from cp_rewrite.passes.graph.writes import memory_of, written_nodes
from cp_rewrite.torch_internals import FakeTensorMode, expression, fake_mode_of

from .chunks import TURNED, Chunks, End, is_dead
from .join_regions import CHUNKS, JOINED, NotAlike, call_on_all

CUTS = ("chunk", "split", "tensor_split")


def join_chunks(gm: fx.GraphModule, counts: Collection[Any], kept: Collection[fx.Node]) -> bool:
    """Join such loops of a graph; returns whether there were any.

    Args:
        counts: the number of tokens, in as many symbols as there are. kept: nodes that are read beside the graph.
    """
    cuts = {node: dim for node in gm.graph.nodes if (dim := _cut_dim(node, counts)) is not None}
    mode = fake_mode_of(gm.graph.nodes)
    if not cuts or mode is None:
        return False
    _read_results(gm.graph)
    chunks = Chunks(cuts, dict.fromkeys(counts, next(iter(counts))))
    try:
        for node in gm.graph.nodes:
            chunks.visit(node)
        ends = chunks.ends()
    except (NotAlike, TypeError):
        return False
    gone = {*cuts, *(n for key in chunks.whole for n in chunks.members[key]), *(n for end in ends for n in end.nodes)}
    return not gone & {*kept} and _Joiner(gm.graph, chunks, mode).join(ends, gone)


@dataclass
class _Joiner:
    graph: fx.Graph
    chunks: Chunks
    mode: FakeTensorMode

    def join(self, ends: Sequence[End], gone: set[fx.Node]) -> bool:
        """Change the graph; False: it can't be, and is as it was."""
        made: list[fx.Node] = []
        try:
            self.check_modes(ends)
            self.check_unwritten(ends)
            joined = self._joined(made)
            results = [self._result(end, joined, made) for end in ends]
        except Exception:  # the nodes can't run on all chunks at once
            for node in reversed(made):
                self.graph.erase_node(node)
            self.drop_bodies()
            return False
        for end, result in zip(ends, results, strict=True):
            end.last.replace_all_uses_with(result)
        gone |= {n for n in self.graph.nodes if is_dead(n) and any(x in gone for x in n.all_input_nodes)}
        gone |= {n for n in self.graph.nodes if n.op == "get_attr" or op_name(n) in TURNED}
        for node in reversed([n for n in self.graph.nodes if n in gone]):
            if not node.users:
                self.graph.erase_node(node)
        self.drop_bodies()
        return True

    def check_modes(self, ends: Sequence[End]) -> None:
        """Raise NotAlike where nodes that become one run in several modes."""
        modes = modes_of(self.graph)
        for nodes in [*(self.chunks.members[key] for key in self.chunks.whole), *(end.nodes for end in ends)]:
            if any(modes[n] != modes[nodes[0]] for n in nodes):
                raise NotAlike

    def check_unwritten(self, ends: Sequence[End]) -> None:
        """Raise NotAlike where a node writes, between the first chunk and the last, into what chunks or ends read."""
        members = {n: None for key in self.chunks.whole for n in self.chunks.members[key]}
        adds = {n for end in ends for n in end.nodes}
        read = [x for n in members for x in n.all_input_nodes if x not in members]
        read += [x for end in ends for x in end.others or () if isinstance(x, fx.Node)]
        memory = {memory_of(n) for n in [*read, *(cut.args[0] for cut in self.chunks.cuts)]} - {None}  # type: ignore[arg-type]
        nodes = [*self.graph.nodes]
        places = [place for place, n in enumerate(nodes) if n in members or n in adds]
        for node in nodes[places[0] : places[-1]]:
            if node not in adds and any(memory_of(target) in memory for target in written_nodes(node)):
                raise NotAlike

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

    def _result(self, end: End, joined: dict[int, fx.Node], made: list[fx.Node]) -> fx.Node:
        result, *more = [joined[key] for key in end.keys]
        old: Tensor = end.last.meta["example_value"]
        if end.others is None:
            new: Tensor = result.meta["example_value"]
            if [*map(expression, old.shape)] != [*map(expression, new.shape)] or old.dtype != new.dtype:
                raise NotAlike
            return result
        if any(JOINED not in joined[key].meta for key in end.keys):
            raise NotAlike
        for key in end.keys:
            joined[self._unscaled(key, end, joined)].meta[JOINED] = "sum"
        for other in (*more, *end.others):
            with self.graph.inserting_before(end.last):
                new_sum = self.graph.call_function(operator.add, (other, result))
            result = self._ran(new_sum, end.last, made)
        return result

    def _unscaled(self, key: int, end: End, joined: dict[int, fx.Node]) -> int:
        """The key of what is added up, before others than chunks scale it: the sum is scaled as well as its terms."""
        readers = {*end.nodes}
        while True:
            members = self.chunks.members[key]
            scaled = _scaled(members[0], self.chunks.parts)
            before = None if scaled is None else self.chunks.parts[scaled].key
            if before is None or JOINED not in joined[before].meta:
                return key
            if any(user not in readers for n in members for user in n.users):
                return key
            del joined[key].meta[JOINED]
            key, readers = before, {*members}

    def _ran(self, new: fx.Node, like: fx.Node, made: list[fx.Node]) -> fx.Node:
        """A new node with the place in the source of one like it."""
        made.append(new)
        place_by(new, like, self.mode)
        return new


def _scaled(node: fx.Node, parts: Collection[fx.Node]) -> fx.Node | None:
    """What a node multiplies or divides by something that is no chunk's."""
    of_chunk = [x for x in node.args if isinstance(x, fx.Node) and x in parts]
    if op_name(node) not in ("mul", "div") or len(node.args) != 2 or node.kwargs or len(of_chunk) != 1:
        return None
    return of_chunk[0] if op_name(node) == "mul" or node.args[0] is of_chunk[0] else None


def _read_results(graph: fx.Graph) -> None:
    """Let what reads a tensor behind `x.add_(y)` read what that returns, which is the same: so terms make a chain."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        total: Any = node.args[0] if node.args else None
        if node.op == "call_method" and node.target == "add_" and isinstance(total, fx.Node):
            total.replace_all_uses_with(node, delete_user_cb=lambda user, node=node: places[user] > places[node])


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
