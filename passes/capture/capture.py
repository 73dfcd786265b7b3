"""Take a graph from Dynamo: a copy, with those of its nested regions, that passes may change, in nodes that they know.

capture                the copy, and the `State` that passes hand on
decide_bounds, …       sizes and numbers that are those of this batch; views, sizes and masks that regions are given
copied, for_eager      copies of a graph with its regions
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.utils._pytree import tree_leaves

from cp_rewrite.batch.active import ActivePlan
from cp_rewrite.batch.as_row import AsRow, row_of
from cp_rewrite.passes.graph.dynamo import break_reason, ends_of, is_resumed
from cp_rewrite.passes.graph.new_nodes import give_sizes
from cp_rewrite.passes.graph.nodes import (
    RegionCall,
    attribute_of,
    erase_unread_numbers,
    give_body,
    graph_modules,
    guard_number,
    is_compile_region,
    modes_of,
    op_name,
    outputs_of,
    read_as,
    region_call,
    region_calls,
    value_of,
)
from cp_rewrite.passes.graph.tokens import LOCAL, TokenAxis
from cp_rewrite.passes.values.state import Frame, State
from cp_rewrite.sharding import Sharding, device_of
from cp_rewrite.torch_internals import Max, Min, expression, fake_mode_of, guard, holds, in_example, is_wrapped

from .attention import part_flash_attn, part_multihead
from .chunks import join_chunks, loops_left
from .encoders import take_out_encoders
from .moves import part_moves
from .picks import read_by_mask, sum_picked
from .scatters import part_masked_scatter, place_writes

_PLAIN: dict[str, Any] = {"is_all_true": torch.all, "is_any_true": torch.any}
"""The functions that `torch._check_tensor_all` calls, by name -> their usual ones."""


def capture(gm: fx.GraphModule, sharding: Sharding, plan: ActivePlan, loss_alone: bool = False) -> State:
    """A copy of Dynamo's graph, ready for the passes: adding placeholders to Dynamo's own graph would break it."""
    copies: dict[fx.Node, fx.Node] = {}
    copy = copied(gm, copies)
    ends = ends_of(gm)
    kept = {copies[node]: where for node, where in ends.kept.items() if node in copies}
    _return_without(copy, {copies[node] for node in ends.unread if node in copies})
    look_like_row(copy)
    refusals = take_out_encoders(copy)
    give_sizes_once(copy)
    decide_bounds(copy)
    part_multihead(copy)
    part_flash_attn(copy)
    for module in graph_modules(copy):
        for node in module.graph.nodes:
            if (plain := _PLAIN.get(op_name(node))) is not None:
                node.op, node.target = "call_function", plain
    places = {node: place for place, node in enumerate(outputs_of(copy)) if node in kept}
    size_repeats(copy)
    undo_views(copy, kept)
    tokens = TokenAxis.read(copy, sharding, plan.handed.tokens)
    settle_numbers(copy, tokens.symbols)
    part_by_masks(copy, tokens.symbols)
    chunked = False
    if sharding.resolve:
        part_masked_scatter(copy, tokens.counts, kept)
        read_by_mask(copy, tokens.counts)
        place_writes(copy, tokens.counts)
        part_moves(copy, tokens.counts)
        sum_picked(copy, tokens.counts, kept)
        chunked = join_chunks(copy, tokens.counts, kept)
        for module in graph_modules(copy)[1:]:
            chunked |= join_chunks(module, tokens.counts, kept)
        refusals = (*refusals, *(left for module in graph_modules(copy) for left in loops_left(module, tokens.counts)))
    erase_unread_numbers(copy)  # Dynamo keeps in the graph of a region what nothing reads
    device = plan.device if plan.device.type != "cpu" else device_of(sharding)
    given = outputs_of(copy)  # other nodes may have taken the place of those that are kept
    kept = {given[places[node]] if node in places else node: where for node, where in kept.items()}
    frame = Frame(kept, frozenset(places.values()), break_reason(gm), is_resumed())
    return State(copy, sharding, tokens, device, plan, frame, loss_alone, chunked=chunked, refusals=refusals)


def look_like_row(gm: fx.GraphModule) -> None:
    """Let inputs that look as long as the row have plain fake tensors of that shape; `LOCAL` keeps this rank's."""
    for module in graph_modules(gm):
        for node in module.graph.find_nodes(op="placeholder"):
            value = node.meta.get("example_value")
            if isinstance(value, AsRow):
                node.meta |= {"example_value": row_of(value).requires_grad_(value.requires_grad), LOCAL: value.held}


def decide_bounds(gm: fx.GraphModule) -> None:
    """Let a size that is the lesser or the greater of two be the one that it is in this batch; another batch, where it
    is the other, is compiled anew.

    h[:, :min(T, 20)]: (B, min(T, 20), 8)    ->    h[:, :T]: (B, T, 8)    guarded by T <= 20
    """
    mode = fake_mode_of(gm.graph.nodes)
    nodes = [node for module in graph_modules(gm) for node in module.graph.nodes]
    values = [x for node in nodes for x in tree_leaves(node.meta.get("example_value")) if isinstance(x, Tensor)]
    # Not of maps: what is wrapped has no sizes of its own.
    sizes = dict.fromkeys(expression(n) for x in values if not is_wrapped(x) for n in x.shape if isinstance(n, SymInt))
    atoms = {bound for size in sizes for bound in size.atoms(Min, Max)}
    known = [bound for bound in atoms if mode is not None and in_example(mode.shape_env, bound).is_number]
    bounds = sorted(known, key=lambda b: (b.count_ops(), str(b)))
    if mode is None or not bounds:
        return
    found: dict[Any, Any] = {}
    for bound in bounds:
        best, *others = sorted(bound.args, key=lambda arg: arg.is_number)  # of equal ones that which stays open
        for other in others:
            better = (sympy.Le if isinstance(bound, Min) else sympy.Ge)(best, other)
            if better not in (sympy.true, sympy.false):
                guard(mode.shape_env, better)
            best = best if holds(mode.shape_env, better) else other
        found[bound] = best.xreplace(found)
    give_sizes(nodes, found, mode)
    for node in nodes:
        numbers = [n for n in node.all_input_nodes if n.target in (torch.sym_min, torch.sym_max)]
        for number in numbers:
            if isinstance(value := value_of(number), int):
                read_as(number, value, [node])
            else:
                same = [n for n in number.all_input_nodes if expression(value_of(n)) == expression(value)]
                node.replace_input_with(number, same[0]) if same else None


def _asserts(node: fx.Node) -> list[fx.Node] | None:
    """A node and those that follow from it, users first, if they only assert something."""
    if node.target is torch.ops.aten._assert_scalar.default:
        return [node]
    chains = [_asserts(user) for user in node.users]
    if None in chains or not chains or isinstance(value_of(node), Tensor):
        return None
    return [*(each for chain in chains for each in chain or ()), node]


def size_repeats(gm: fx.GraphModule) -> None:
    """Say how many entries `repeat_interleave` gives where the model goes on with as many as there are tokens. Torch
    asserts that when it runs, and a rank would have the row's beside its own tokens.

        seg = repeat_interleave(ids, lengths)    assert seg.shape[0] == s0
    ->  seg = repeat_interleave(ids, lengths, output_size=s0)
    """
    for module in graph_modules(gm):
        for node in [*module.graph.nodes]:
            if op_name(node) != "repeat_interleave" or node.kwargs.get("output_size") is not None:
                continue
            sizes = [user for user in node.users if user.target is torch.ops.aten.sym_size.int]
            chains = [_asserts(size) for size in sizes]
            equal = [user for size in sizes for user in size.users if user.target is operator.eq]
            known = [x for eq in equal for x in eq.args if isinstance(x, fx.Node) and x.op == "placeholder"]
            if known and None not in chains:
                node.kwargs = {**node.kwargs, "output_size": known[0]}
                for dead in (each for chain in chains for each in chain or ()):
                    module.graph.erase_node(dead)


_VIEWS = frozenset("view reshape flatten unflatten".split())


def undo_views(gm: fx.GraphModule, kept: Collection[fx.Node]) -> None:
    """Read the tensor itself where views of it come back to its shape: rows of choices, that a model joins.

    ids (6, T)    ids.unflatten(0, (2, 3)).view(-1, T)    ->    ids

    Views that nothing reads then go, but those that are `kept`.
    """
    for module in graph_modules(gm):
        modes = modes_of(module.graph)
        for node in module.graph.nodes:
            before = _viewed(node)
            while before is not None and _geometry(before) != _geometry(node):
                before = _viewed(before)
            if before is not None and _viewed(node) is not before and modes[before] == modes[node]:
                node.replace_all_uses_with(before)
                while node is not before and not node.users and node not in kept:
                    viewed: Any = _viewed(node)
                    module.graph.erase_node(node)
                    node = viewed


def _viewed(node: fx.Node) -> fx.Node | None:
    """The node that a node is a view of, in other dims; None: it is no view."""
    of = node.args[0] if op_name(node) in _VIEWS and node.args else None
    return of if isinstance(of, fx.Node) else None


def _geometry(node: fx.Node) -> tuple[Hashable, ...]:
    value = value_of(node)
    if not isinstance(value, Tensor):  # not shown by the graph
        return (node,)
    return (value.dtype, value.requires_grad, *map(expression, (*value.shape, *value.stride())))


def _return_without(gm: fx.GraphModule, unread: set[fx.Node]) -> None:
    """Let a graph give None in the place of these results."""
    output = next(iter(gm.graph.find_nodes(op="output")))
    output.args = fx.map_arg(output.args, lambda node: None if node in unread else node)


def give_sizes_once(gm: fx.GraphModule) -> None:
    """Give each region a size once that it is given more than once.

    checkpoint(body, s0, x, s1, cos)    with s1 = s0    ->    checkpoint(body, s0, x, cos)

    The first of equal blocks is traced before torch learns that two sizes are one, and the others behind it: so they
    are the same graph, and are compiled once.
    """
    for graph, nodes in region_calls(gm).items():
        calls = [call for node in nodes if (call := region_call(node)) is not None]
        repeated = _repeated(graph, calls)
        for call in calls:
            rest = [operand for inside, operand in call.filled.items() if inside not in repeated]
            call.node.args = (*call.node.args[: len(call.node.args) - len(call.operands)], *rest)
        for inside, first in repeated.items():
            inside.replace_all_uses_with(first)
            graph.erase_node(inside)


def settle_numbers(gm: fx.GraphModule, tokens: Collection[Any]) -> None:
    """Let numbers that torch decided by the example's sizes be these; another batch, with others, is compiled anew.

    h * (1 + (T > 25))    ->    h * 1    guarded by T <= 25: torch adds the comparison as the number that it is
    torch._check(T > 20)    ->           guarded by T > 20

    Args:
        tokens: symbols that count tokens. What is checked of others, as of lengths that the batch holds, stays.
    """
    for module in graph_modules(gm):
        for node in [n for n in module.graph.nodes if n.op == "call_function"]:
            if op_name(node) in ("check", "assert_scalar.default"):
                asked = [value_of(n) for n in node.all_input_nodes]
                of_tokens = [*map(type, asked)] == [SymBool] and expression(asked[0]).free_symbols <= {*tokens}
                if of_tokens and bool(asked[0]):
                    module.graph.erase_node(node)
            elif isinstance(value := value_of(node), SymInt | SymFloat) and expression(value).is_number:
                for operand in node.all_input_nodes:
                    if isinstance(decided := value_of(operand), SymBool):
                        bool(decided)
                read_as(node, guard_number(value), [*node.users])
                module.graph.erase_node(node)


def part_by_masks(gm: fx.GraphModule, tokens: Collection[Any]) -> None:
    """Give calls of a region that pass other masks a body of their own: what is proven of attention is of one mask.

    Args:
        tokens: symbols that count tokens. A tensor with two such dims is a mask.
    """
    for nodes in region_calls(gm).values():
        calls = [call for node in nodes if (call := region_call(node)) is not None]
        groups: dict[tuple[Any, ...], list[RegionCall]] = {}
        for call in calls:
            masks = tuple(x for x in call.operands if isinstance(x, fx.Node) and _is_square(value_of(x), tokens))
            groups.setdefault(masks, []).append(call)
        for group in [*groups.values()][1:]:
            body = copied(group[0].body, {})
            for call in group:
                call.node.args = (*give_body(body, call.node.target, call.node), *call.operands)


def _is_square(value: Any, tokens: Collection[Any]) -> bool:
    sizes = value.shape if isinstance(value, Tensor) else ()
    return sum(not expression(size).free_symbols.isdisjoint(tokens) for size in sizes) > 1


def _repeated(graph: fx.Graph, calls: Sequence[RegionCall]) -> dict[fx.Node, fx.Node]:
    """A size among a region's inputs -> the first one that equals it, in all calls."""
    firsts: dict[Hashable, fx.Node] = {}
    found: dict[fx.Node, fx.Node] = {}
    for inside in graph.find_nodes(op="placeholder"):
        if isinstance(value_of(inside), SymInt):
            given = (expression(value_of(inside)), *(_size(call.filled[inside]) for call in calls))
            if (first := firsts.setdefault(given, inside)) is not inside:
                found[inside] = first
    return found


def _size(operand: Any) -> Hashable:
    return expression(value_of(operand) if isinstance(operand, fx.Node) else operand)


def copied(gm: fx.GraphModule, copies: dict[fx.Node, fx.Node]) -> fx.GraphModule:
    """The graph and those of its nested regions; tensors and other modules are shared. Notes the copy of each node."""
    graph = fx.Graph()
    result: Any = graph.graph_copy(gm.graph, copies, return_output_node=True)
    graph.output(result[0]).meta = dict(result[1].meta)
    copy = fx.GraphModule(gm, graph)
    copy.meta = dict(gm.meta)
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(body := attribute_of(node), fx.GraphModule):
            setattr(copy, str(node.target), copied(body, copies))
    return copy


def for_eager(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that runs node by node: regions that are compiled once for all are called as modules. Their operator first
    runs a body on memory that holds anything, to learn of its results, and tables of places hold anything then."""
    copy = copied(gm, {})
    for module in graph_modules(copy):
        for node in module.graph.nodes:
            call = region_call(node)
            if call is not None and is_compile_region(node):
                node.op, node.target, node.args = "call_module", str(node.args[0].target), call.operands
        module.recompile()
    return copy
