"""Loops over chunks of tokens that treat all chunks alike, as one run over all of them.

    for x, y in zip(logits.chunk(8, dim=1), labels.chunk(8, dim=1)):
        total = total + cross_entropy(x, y, reduction="sum")          ->     cross_entropy(logits, labels, …)

    torch.cat([f(h[:, i : i + 8]) for i in range(0, T, 8)], 1)        ->     f(h)
    torch.cat([x * i for i, x in enumerate(h.split(8, 1))], 1)        ->     h * (the number of each token's chunk)

Both are the same where every joined node gives rows, each made of its own token, and those that are added up give sums
over tokens. Joined nodes, also of nested regions, are marked for the locality check, which proves that or refuses them.

    Bodies, call_on_all          bodies of nested regions that work on chunks
    Chunks, OfChunk, End, Cut    which nodes do the same with each chunk, and where chunks meet
    join_chunks, _Joiner         the change
    loops_left                   loops that are not joined
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.passes.graph.dynamo import first_difference
from cp_rewrite.passes.graph.new_nodes import autocasts_open, maker, place_by
from cp_rewrite.passes.graph.nodes import (
    RegionCall,
    bind,
    give_body,
    memory_of,
    modes_of,
    nested_graphs,
    op_name,
    region_call,
    value_of,
    writers_between,
    written_nodes,
)
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.torch_internals import FakeTensorMode, expression, fake_mode_of, has_one, ranges_of

JOINED = "cp_rewrite_joined"
"""The mark in a node's `meta`: "sum" of one that is added up, "rows" of others."""

IN_ORDER = "cp_rewrite_in_order"
"""The mark of one in the place of a `cat`: the dim in which chunks stood one behind another, so what was cut must, and
whether that was the tokens of all rows, joined."""
CHUNKS = "cp_rewrite_chunks"
"""Beside it: how many chunks the node was computed in. It is what a loop holds at a time (`passes/tile.py`)."""


class NotAlike(Exception):
    """Chunks are not treated alike."""


class Bodies:
    """Numbers of regions' bodies: one for those that compute alike."""

    def __init__(self) -> None:
        self.known: list[fx.GraphModule] = []

    def number(self, body: fx.GraphModule) -> int:
        for number, other in enumerate(self.known):
            if body is other or first_difference(other, body, _equal) is None:
                return number
        self.known.append(body)
        return len(self.known) - 1


def _equal(a: Any, b: Any) -> bool:
    return expression(a) == expression(b)


def _makes_tensor(node: fx.Node, chunked: Collection[fx.Node]) -> bool:
    """True if a node makes a tensor of a chunk's size alone, as positions in a chunk are.

    chunked: those of its operands that are computed of a chunk.
    """
    return _has_tensor(node) and bool(chunked) and not any(map(_has_tensor, chunked))


def _has_tensor(node: fx.Node) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(node.meta.get("example_value")))


def call_on_all(
    call: RegionCall,
    operands: Sequence[Any],
    of_chunk: Sequence[bool],
    before: fx.Node,
    mode: FakeTensorMode,
    chunks: int,
) -> fx.Node:
    """A call of a copy of a region's body, in front of a node, on operands of all chunks, as of a loss that is
    checkpointed chunk by chunk.

        for x, y in zip(h.chunk(8, dim=1), labels.chunk(8, dim=1)):
            total = total + checkpoint(part, x, y)                        ->     checkpoint(part, h, labels)

    Dynamo captures a body for each chunk. Where all of them compute alike, a copy of one runs on all chunks.

    Args:
        operands: in the place of `call.operands`. of_chunk: which of these are computed of one chunk.
        chunks: how many there are.
    Raises:
        NotAlike: the body works on more than its chunk. Others: it can't run on all chunks.
    """
    values = [value_of(x) if isinstance(x, fx.Node) else x for x in operands]
    body, result = _body_on(call.body, values, of_chunk, mode)
    for node in body.graph.nodes:
        if JOINED in node.meta:
            node.meta[CHUNKS] = chunks
    target: Any = call.node.target
    args = (*give_body(body, target, before), *operands)
    with before.graph.inserting_before(before):
        new = before.graph.call_function(target, args, dict(call.node.kwargs))
    new.meta = {**call.node.meta, "example_value": result}
    return new


def _body_on(
    body: fx.GraphModule, values: Sequence[Any], of_chunk: Sequence[bool], mode: FakeTensorMode
) -> tuple[fx.GraphModule, Any]:
    """A copy of a body whose nodes have run on other values of its inputs, and what it gives."""
    graph, modes = fx.Graph(), modes_of(body.graph)
    inputs = body.graph.find_nodes(op="placeholder")
    chunked = {node for node, chunk in zip(inputs, of_chunk, strict=True) if chunk}
    given = dict(zip(inputs, values, strict=True))
    copies: dict[fx.Node, fx.Node] = {}
    result: Any = None
    for node in body.graph.nodes:
        new = copies[node] = graph.node_copy(node, copies.__getitem__)
        if node in given:
            new.meta |= {"example_value": given[node]} | ({JOINED: "rows"} if node in chunked else {})
        elif node.op == "output":
            result = fx.map_arg(new.args[0], lambda n: n.meta["example_value"])
        elif node.op != "get_attr" and "example_value" in node.meta:
            read = [n for n in node.all_input_nodes if n in chunked]
            if nested_graphs(node) or written_nodes(node) or _makes_tensor(node, read):
                raise NotAlike
            with autocasts_open(modes[node][0]):
                place_by(new, node, mode)
            if read:
                chunked.add(node)
                if isinstance(new.meta["example_value"], Tensor):
                    new.meta[JOINED] = "rows"
    module = fx.GraphModule(body, graph)
    module.meta = dict(body.meta)
    return module, result


TURNED = frozenset("getattr t transpose permute to float double bfloat16 half detach contiguous".split())


@dataclass(frozen=True)
class OfChunk:
    """Says that a node works on chunk `number`; nodes that do the same with other chunks have the same `key`."""

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


@dataclass(frozen=True, eq=False)
class Cut:
    """Chunks of a tensor's tokens.

    source: what is cut. sizes: of the chunks. parts: nodes that give them -> their numbers. node: that cuts; None:
    slices are taken one behind another, as `for i in range(0, T, 8): h[:, i:i + 8]` does.
    """

    source: fx.Node
    sizes: tuple[Any, ...]
    parts: dict[fx.Node, int]
    node: fx.Node | None = None


@dataclass
class Chunks:
    """Nodes by what they compute of chunks.

        x, y = h.chunk(2, dim=1)
        s = head(x).sum() + head(y).sum()        keys: chunk, head, sum; `s` is the end of the last

    symbols: of the number of tokens -> one of them, since they will be one. sources: by keys of chunks, what was cut.
    numbers: by keys of `x * i`, the number of each chunk. unfit: keys of what can't be done with all chunks at once.
    """

    cuts: Sequence[Cut]
    symbols: dict[Any, Any]
    parts: dict[fx.Node, OfChunk] = field(default_factory=dict)
    keys: dict[Any, int] = field(default_factory=dict)
    members: dict[int, list[fx.Node]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    firsts: dict[Any, fx.Node] = field(default_factory=dict)
    bodies: Bodies = field(default_factory=Bodies)
    unfit: set[int] = field(default_factory=set[int])
    times: Counter[Any] = field(default_factory=Counter[Any])
    sources: dict[int, fx.Node] = field(default_factory=dict[int, fx.Node])
    numbers: dict[int, dict[int, float]] = field(default_factory=dict[int, dict[int, float]])

    def visit(self, node: fx.Node) -> None:
        if (cut := next((cut for cut in self.cuts if node in cut.parts), None)) is not None:
            sizes = tuple(size.subs(self.symbols) for size in cut.sizes)
            self._add(node, ("cut", cut), cut.parts[node], sizes)
            self.sources[self.parts[node].key] = cut.source
            return
        parts = [self.parts[n] for n in node.all_input_nodes if n in self.parts]
        if len({(part.number, part.sizes) for part in parts}) != 1 or node.op not in ("call_function", "call_method"):
            return
        args: Any = node.args
        if (call := region_call(node)) is not None:
            read = [given for inside, given in call.filled.items() if inside.users]  # a chunk's own sizes may not be
            args = (self.bodies.number(call.body), *read)
        number = next((x for x in args if type(x) in (int, float)), None) if self._takes_number(node) else None
        if number is not None:  # another one for each chunk, as `i` of enumerate
            args = tuple(type(x) if x is number else x for x in args)
        what = self._pattern(args[:1] if _is_reshape(node) else args)  # sizes may be a chunk's own
        key = (node.op, node.target, what, self._pattern(node.kwargs))
        self._add(node, key, parts[0].number, parts[0].sizes)
        if number is not None:
            self.numbers.setdefault(self.parts[node].key, {})[parts[0].number] = number
        if self._is_unfit(node) or (call is None and nested_graphs(node)):
            self.unfit.add(self.parts[node].key)

    def shape(self, key: int) -> list[Any]:
        """The sizes to which what a `view` or the like gives of each chunk is brought of all, -1 for tokens.

        (B, 4, 2, 8), (B, 4, 2, 8), (B, T - 8, 2, 8)      B, -1, 2, 8

        Raises:
            NotAlike: they differ in something else than their tokens.
        """
        members = sorted(self.members[key], key=lambda n: self.parts[n].number)
        found = [[expression(size).subs(self.symbols) for size in value_of(n).shape] for n in members]
        tokens = {symbol for count in self.symbols.values() for symbol in count.free_symbols}
        dims = [dim for dim, size in enumerate(found[-1]) if size.free_symbols & tokens]
        if len(dims) != 1:
            raise NotAlike
        (dim,), sizes = dims, self.parts[members[0]].sizes
        each = [
            sympy.expand(shape[dim] * sizes[0] - found[0][dim] * size) for shape, size in zip(found, sizes, strict=True)
        ]
        if any(each) or any(shape[:dim] + shape[dim + 1 :] != found[0][:dim] + found[0][dim + 1 :] for shape in found):
            raise NotAlike
        given = [*value_of(members[0]).shape]
        if any(not isinstance(size, int) for i, size in enumerate(given) if i != dim):
            given = tree_leaves(members[0].args[1:])
            if len(given) != len(found[0]) or any(x in self.parts or x == -1 for i, x in enumerate(given) if i != dim):
                raise NotAlike
        return [-1 if i == dim else size for i, size in enumerate(given)]

    def is_size(self, node: fx.Node) -> bool:
        """True if a node gives sizes to nothing but reshapes of whole parts, which take them from `shape`."""
        plain = node.op in ("call_function", "call_method") and not _has_tensor(node)
        return plain and all((self._is_whole(n) and _is_reshape(n)) or self.is_size(n) for n in node.users)

    def _is_whole(self, node: fx.Node) -> bool:
        return node in self.parts and self.parts[node].key in self.whole

    def _takes_number(self, node: fx.Node) -> bool:
        """True if a node adds a number to its chunk, or scales it."""
        plain = len(node.args) == 2 and not node.kwargs and not written_nodes(node)
        return plain and op_name(node) in ("add", "sub", "mul", "div")

    def _is_unfit(self, node: fx.Node) -> bool:
        """True if a node does what can't be done with all chunks at once."""
        if any(self._has_all(n) for n in node.all_input_nodes if n not in self.parts):
            return True
        if written_nodes(node) and op_name(node) != "add":
            return True
        if op_name(node) == "squeeze" and any(map(has_one, value_of(node.args[0]).shape)):
            return True
        return _makes_tensor(node, [n for n in node.all_input_nodes if n in self.parts])

    def _has_all(self, node: fx.Node) -> bool:
        """True if a node's tensor has a dim of all tokens."""
        value = node.meta.get("example_value")
        symbols = {symbol for count in self.symbols for symbol in count.free_symbols}
        return isinstance(value, Tensor) and any(expression(n).free_symbols & symbols for n in value.shape)

    def _add(self, node: fx.Node, what: Any, number: int, sizes: tuple[Any, ...]) -> None:
        again = self.times[what, number]  # `x * 2 + x * 3`: these are two keys
        self.times[what, number] += 1
        key = self.keys.setdefault((what, again), len(self.keys))
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

    @functools.cached_property
    def whole(self) -> list[int]:
        """Keys of what is computed of all chunks, once of each."""
        return [
            key
            for key, nodes in self.members.items()
            if sorted(self.parts[n].number for n in nodes) == list(range(self.counts[key]))
        ]

    def ends(self) -> list[End]:
        """Raises NotAlike where something else reads chunks. What is computed of some of them, as a loop's total is, is
        read behind an end."""
        whole = {*self.whole}
        if self.unfit & whole or not all(self.keys.get((("cut", cut), 0)) in whole for cut in self.cuts):
            raise NotAlike
        found: list[End] = []
        adds: dict[fx.Node, None] = {}
        for key in whole:
            readers = {
                user: None
                for node in self.members[key]
                for user in node.users
                if not (self._is_whole(user) or is_dead(user) or self.is_size(user))
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
            sums = [user for user in stack.users if _is_total(user, "sum")]
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


def _is_total(node: fx.Node, *names: str) -> bool:
    """True if a node is an op of these names, over all entries of its operand."""
    return op_name(node) in names and len(node.args) == 1 and not node.kwargs


def _is_reshape(node: fx.Node) -> bool:
    """True if a node only brings its tensor to other sizes, which it names one by one or relative to its own."""
    sizes = tree_leaves(node.args[1:])
    plain = node.op == "call_method" and op_name(node) in ("view", "reshape", "unflatten") and not node.kwargs
    return plain and all(isinstance(size, int | fx.Node) for size in sizes)


def _is_shared(total: Any, last: fx.Node, adds: Collection[fx.Node]) -> bool:
    """True if more than the chunks' terms (`adds`) use the tensor that they are added to: it is an input, or has
    further users, or views up to `last`."""
    if not isinstance(total, fx.Node):
        return False
    nodes = [*total.graph.nodes]
    before = nodes[: nodes.index(last)]
    views = any(memory_of(n) == memory_of(total) for n in before if n is not total and n not in adds)
    return total.op in ("placeholder", "get_attr") or len(total.users) > 1 or views


def is_dead(node: fx.Node) -> bool:
    return not node.users and node.op in ("call_function", "call_method") and not written_nodes(node)


CUTS = ("chunk", "split", "tensor_split")


def join_chunks(gm: fx.GraphModule, counts: Collection[Any], kept: Collection[fx.Node]) -> bool:
    """Join loops over chunks of tokens in a graph; returns whether there were any.

    Args:
        counts: the number of tokens, in as many symbols as there are. kept: nodes that are read beside the graph.
    """
    if not counts:  # as behind a graph break, with no argument of the batch's
        return False
    mode, symbols = fake_mode_of(gm.graph.nodes), dict.fromkeys(counts, next(iter(counts)))
    cuts = _cuts(gm.graph, counts, kept)
    slices = _slices(gm.graph, counts)
    if mode is None or not (cuts or slices):
        return False
    _read_results(gm.graph)
    if _join(gm.graph, Chunks([*cuts, *slices], symbols), mode, kept):
        return True
    if not slices:
        return False
    # Some slices may be no loop's: all that are of a size are.
    joined = bool(cuts) and _join(gm.graph, Chunks(cuts, symbols), mode, kept)
    for sizes in dict.fromkeys(cut.sizes for cut in slices):
        alike = [cut for cut in _slices(gm.graph, counts) if cut.sizes == sizes]
        joined |= bool(alike) and _join(gm.graph, Chunks(alike, symbols), mode, kept)
    return joined


def loops_left(gm: fx.GraphModule, counts: Collection[Any]) -> list[Refusal]:
    """Slices of loops over a range of tokens that are not joined: right for some numbers of chunks alone.

    Where no slices begin where a range's steps do, each as far behind it, they are no loop's.
    """
    mode = fake_mode_of(gm.graph.nodes)
    ranges = ranges_of(mode.shape_env) if mode is not None else ()
    starts: dict[int, fx.Node] = {}
    for node in gm.graph.nodes if ranges else ():
        taken = _slice(node)
        if taken is not None and _is_counted(taken[0].meta["example_value"].shape[taken[1]], counts):
            starts.setdefault(taken[2], node)
    for steps in (steps for steps in ranges if len(steps) > 1):
        for by in (start - steps[-1] for start in starts):
            places = [max(place + by, 0) for place in steps]
            if len({*places}) >= min(len(steps), 3) and {*places} <= {*starts}:  # the first few may reach back to 0
                detail = (
                    "takes tokens chunk by chunk, by a range: a loop over chunks runs on all tokens where it treats "
                    "each alike, and only adds up their sums or joins their rows in order"
                )
                return [Refusal(Reason.TOKEN_MIXING, detail, starts[places[-1]])]
    return []


def _join(graph: fx.Graph, chunks: Chunks, mode: FakeTensorMode, kept: Collection[fx.Node]) -> bool:
    try:
        for node in graph.nodes:
            chunks.visit(node)
        ends = chunks.ends()
    except (NotAlike, TypeError):
        return False
    gone = {cut.node for cut in chunks.cuts if cut.node is not None}
    gone |= {*(n for key in chunks.whole for n in chunks.members[key]), *(n for end in ends for n in end.nodes)}
    gone |= {n for n in chunks.parts if chunks.is_size(n)}
    return not gone & {*kept} and _Joiner(graph, chunks, mode).join(ends, gone)


def _cuts(graph: fx.Graph, counts: Collection[Any], kept: Collection[fx.Node]) -> list[Cut]:
    """Chunks that one node gives. Those that Python only counts are taken out."""
    found: list[Cut] = []
    for node in [*graph.nodes]:
        dim = _cut_dim(node, counts)
        if dim is None or _erased_unread(graph, node, kept):
            continue
        sizes = tuple(expression(x.shape[dim]) for x in node.meta["example_value"])
        parts = {user: user.args[1] for user in node.users if user.target is operator.getitem}
        found.append(Cut(node.args[0], sizes, parts, node))  # type: ignore[arg-type]
    return found


def _slices(graph: fx.Graph, counts: Collection[Any]) -> list[Cut]:
    """Slices of equal size that together are all tokens, one behind another; the last may be smaller."""
    taken: dict[Any, dict[int, list[fx.Node]]] = {}
    for node in graph.nodes:
        found = _slice(node)
        if found is not None and _is_counted(found[0].meta["example_value"].shape[found[1]], counts):
            taken.setdefault(found[:2], {}).setdefault(found[2], []).append(node)
    cuts: list[Cut] = []
    for (source, dim), by_start in taken.items():
        total = expression(source.meta["example_value"].shape[dim])
        for loop in range(len(by_start.get(0, ()))):
            nodes = [nodes[loop] for _, nodes in sorted(by_start.items()) if loop < len(nodes)]
            sizes = [expression(n.meta["example_value"].shape[dim]) for n in nodes]
            each, starts = sizes[0], [start for start, nodes in sorted(by_start.items()) if loop < len(nodes)]
            even = all(start == i * each for i, start in enumerate(starts)) and all(n == each for n in sizes[:-1])
            if len(nodes) > 1 and even and sympy.expand(starts[-1] + sizes[-1] - total) == 0:
                cuts.append(Cut(source, tuple(sizes), {n: i for i, n in enumerate(nodes)}))
    return cuts


def _slice(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """(source, dim, start) of a node that takes some entries of one dim, up to a place that it says."""
    source: Any = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(source.meta.get("example_value"), Tensor):
        return None
    ndim = source.meta["example_value"].ndim
    if op_name(node) == "narrow":
        given = bind(node, ("input", "dim", "start", "length"))
        dim, start = given["dim"], given["start"]
        return (source, dim % ndim, start) if isinstance(dim, int) and type(start) is int and start >= 0 else None
    if node.target is not operator.getitem:
        return None
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if Ellipsis in index:
        place = index.index(Ellipsis)
        index = (*index[:place], *[slice(None)] * (ndim + 1 - len(index)), *index[place + 1 :])
    cut = [(dim, i) for dim, i in enumerate(index) if i != slice(None)]
    if len(cut) != 1 or not isinstance(cut[0][1], slice) or cut[0][1].stop is None or cut[0][1].step not in (None, 1):
        return None
    start = cut[0][1].start or 0
    return (source, cut[0][0], start) if type(start) is int and start >= 0 else None


def _erased_unread(graph: fx.Graph, cut: fx.Node, kept: Collection[fx.Node]) -> bool:
    """Take out chunks that Python only counts: `len(x.split(512, 1))`."""
    parts = [*cut.users]
    if any(part.target is not operator.getitem or part.users or part in kept for part in parts) or cut in kept:
        return False
    for node in (*parts, cut):
        graph.erase_node(node)
    return True


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
        memory = {memory_of(n) for n in [*read, *(cut.source for cut in self.chunks.cuts)]} - {None}  # type: ignore[arg-type]
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
        """Nodes that run on all chunks, by key."""
        found = {**self.chunks.sources}
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
            if len({*self.chunks.numbers.get(key, {}).values()}) > 1:
                by_token = self._by_token(key, first, whole, made)
                args = tuple(by_token if type(x) in (int, float) else x for x in args)
            target: Any = first.target
            if _is_reshape(first):
                target, args = target if op_name(first) == "view" else "reshape", (args[0], *self.chunks.shape(key))
            with self.graph.inserting_before(first):
                new = self.graph.create_node(first.op, target, args, kwargs)
            found[key] = self._ran(new, first, made)
            if isinstance(new.meta["example_value"], Tensor):
                new.meta |= {JOINED: "rows", CHUNKS: self.chunks.counts[key]}
        return found

    def _by_token(self, key: int, first: fx.Node, whole: Callable[[fx.Node], fx.Node], made: list[fx.Node]) -> fx.Node:
        """The number of each token's chunk, (T, 1, …) as what it is joined with has its tokens.

        x0 * 1, x1 * 2      x * where(arange(T) >= 8, 2, 1)
        """
        make = maker(first, self.mode)

        def new(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            made.append(make(target, *args, **kwargs))
            return made[-1]

        numbers = [number for _, number in sorted(self.chunks.numbers[key].items())]
        last = next(n for n in self.chunks.members[key] if self.chunks.parts[n].number == len(numbers) - 1)
        (of_last,) = last.all_input_nodes
        value, sizes = value_of(of_last), self.chunks.parts[last].sizes
        dims = [dim for dim, size in enumerate(value.shape) if expression(size).subs(self.chunks.symbols) == sizes[-1]]
        if len(dims) != 1 or not _holds(value.dtype, numbers) or not sizes[-1].free_symbols:
            raise NotAlike
        x = whole(first.all_input_nodes[0])
        count = new("size", x, dims[0])
        places = new(torch.arange, count, device=value.device)
        found = new(torch.full, (count,), numbers[0], dtype=value.dtype, device=value.device)
        each = self._size(sizes, count, new)
        for i, number in enumerate(numbers[1:], 1):
            start = new(operator.mul, each, i) if isinstance(each, fx.Node) else each * i
            found = new("masked_fill", found, new(operator.ge, places, start), number)
        behind = value.ndim - 1 - dims[0]
        return new(operator.getitem, found, (slice(None), *[None] * behind)) if behind else found

    def _size(self, sizes: Sequence[Any], count: fx.Node, new: Callable[..., fx.Node]) -> Any:
        """The size of all chunks but the last."""
        if all(size == sizes[0] and size.is_Integer for size in sizes[:-1]):
            return int(sizes[0])
        symbols = self.chunks.symbols
        alike = [cut.node for cut in self.chunks.cuts if tuple(n.subs(symbols) for n in cut.sizes) == sizes]
        if any(op_name(cut) != "chunk" for cut in alike) or any(size != sizes[0] for size in sizes[:-1]):
            raise NotAlike
        (pieces,) = {bind(cut, ("input", "chunks", "dim"), dim=0)["chunks"] for cut in alike}
        return new(operator.floordiv, new(operator.add, count, pieces - 1), pieces)

    def _result(self, end: End, joined: dict[int, fx.Node], made: list[fx.Node]) -> fx.Node:
        result, *more = [joined[key] for key in end.keys]
        old: Tensor = end.last.meta["example_value"]
        if end.others is None:
            new: Tensor = result.meta["example_value"]
            if [*map(expression, old.shape)] != [*map(expression, new.shape)] or old.dtype != new.dtype:
                raise NotAlike
            if not all(_is_total(n, "sum", "mean") for n in end.last.users):
                dim = bind(end.last, ("tensors", "dim"), dim=0)["dim"] % new.ndim
                result.meta[IN_ORDER] = dim, any(map(self._cuts_joined_rows, self.chunks.cuts))
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

    def _cuts_joined_rows(self, cut: Cut) -> bool:
        """True if a cut is of the tokens of several rows, one row behind another."""
        given = value_of(cut.source).shape
        sizes = [expression(n).subs(self.chunks.symbols) for n in given]
        (tokens,) = {*self.chunks.symbols.values()}
        return not any(sympy.expand(size).coeff(tokens) == 1 for size in sizes)

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


def _holds(dtype: torch.dtype, numbers: Sequence[float]) -> bool:
    """True if an op takes numbers as they are with a tensor of this dtype: a 16-bit one must hold them exactly."""
    if not dtype.is_floating_point:
        return dtype is not torch.bool and all(isinstance(number, int) for number in numbers)
    return dtype.itemsize > 2 or all(torch.tensor(number, dtype=dtype).item() == number for number in numbers)


def _scaled(node: fx.Node, parts: Collection[fx.Node]) -> fx.Node | None:
    """The chunk's node that a node multiplies or divides by something that is no chunk's; None of other nodes."""
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
    return dim if _is_counted(source.shape[dim], counts) and len(node.meta["example_value"]) > 1 else None


def _is_counted(length: Any, counts: Collection[Any]) -> bool:
    """True if a size is made from the number of tokens."""
    size = expression(length)
    return any(size.free_symbols & n.free_symbols or (n.is_Integer and size % n == 0) for n in counts)
