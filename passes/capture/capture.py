"""Take a graph from Dynamo: a copy, with those of its nested regions, that passes may change, in nodes that they know.

part_flash_attn        flash-attn's autograd functions become the operators that they call
part_multihead         `nn.MultiheadAttention` becomes projections around `scaled_dot_product_attention`
capture                the copy, and the `State` that passes hand on
decide_bounds, …       sizes and numbers that are those of this batch; views, sizes and masks that regions are given
copied, for_eager      copies of a graph with its regions
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import sympy
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._pytree import tree_leaves, tree_map_only

from cp_rewrite.batch.active import ActivePlan
from cp_rewrite.batch.as_row import AsRow, row_of
from cp_rewrite.passes.graph.dynamo import break_reason, ends_of, is_resumed
from cp_rewrite.passes.graph.new_nodes import give_sizes, insert, place_by
from cp_rewrite.passes.graph.nodes import (
    RegionCall,
    attribute_of,
    bind,
    constant,
    erase_unread_numbers,
    give_body,
    graph_modules,
    guard_number,
    is_compile_region,
    is_function,
    modes_of,
    nested_graphs,
    op_name,
    outputs_of,
    read_as,
    region_call,
    region_calls,
    schema_of,
    value_of,
)
from cp_rewrite.passes.graph.tokens import LOCAL, TokenAxis
from cp_rewrite.passes.values.state import Frame, State
from cp_rewrite.sharding import Sharding, device_of
from cp_rewrite.torch_internals import (
    FakeTensorMode,
    Max,
    Min,
    expression,
    fake_mode_of,
    guard,
    holds,
    in_example,
    is_wrapped,
)

from .chunks import join_chunks, loops_left
from .encoders import take_out_encoders
from .picks import read_by_mask, sum_picked
from .scatters import part_masked_scatter, part_moves, place_writes

_PADDING_OPS = frozenset("getitem pad empty_like contiguous size sym_size item set_grad_enabled mod sub".split())
"""Other ops of its functions: they pad, cut and allocate."""
_NUMBERS = ("softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "dropout_p")


def is_flash_attn(node: fx.Node, direction: str = "forward") -> bool:
    """Whether a node is flash-attn's operator; one of torch.library's ops, which has a schema."""
    schema = schema_of(node.target)
    if schema is None:
        return False
    namespace, _, name = schema.name.partition("::")
    return "flash_attn" in namespace and name in (f"_flash_attn_{direction}", f"_flash_attn_varlen_{direction}")


def part_flash_attn(gm: fx.GraphModule) -> None:
    """Put the operator in the place of each function of flash-attn, of a graph and of its nested regions.

    flash-attn (2 and 3, and builds of them in other namespaces) calls its operator inside of a
    `torch.autograd.Function`, which is a node with two graphs. In its place stand the nodes of the forward: head dims
    padded to what kernels take, the operator, and its output cut back. Their derivative is the Function's where its
    backward is the same operator's.
    """
    mode = fake_mode_of(gm.graph.nodes)
    for module in graph_modules(gm) if mode is not None else ():
        for node in [*module.graph.nodes]:
            if is_function(node) and _is_flash_function(node):
                _part_flash_attn(node, mode)


def _is_flash_function(node: fx.Node) -> bool:
    """Whether both of a Function's graphs call flash-attn's operator once, with the same numbers, and nothing else that
    computes."""
    bodies = [*nested_graphs(node).values()]
    if any(user.target is not operator.getitem for user in node.users):
        return False
    if len(bodies) != 2 or len(bodies[0].graph.find_nodes(op="placeholder")) != len(node.args) - 2:
        return False
    numbers: list[dict[str, float | None]] = []
    for body, direction in zip(bodies, ("forward", "backward"), strict=True):
        calls = [n for n in body.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
        ops = [n for n in calls if is_flash_attn(n, direction)]
        if len(ops) != 1 or any(op_name(n).partition(".")[0] not in _PADDING_OPS for n in calls if n is not ops[0]):
            return False
        args = bind(ops[0])  # versions of a library order them differently
        args.setdefault("causal", args.get("is_causal"))  # as the backward of 3 calls it
        numbers.append({name: constant(args.get(name)) for name in _NUMBERS})
    return numbers[0] == numbers[1]


def _part_flash_attn(node: fx.Node, mode: FakeTensorMode) -> None:
    body = next(iter(nested_graphs(node).values()))
    copies: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), node.args[2:], strict=True))
    needed = _ancestors([out for out in outputs_of(body)[0] if isinstance(out, fx.Node)])
    for inner in [n for n in body.graph.nodes if n in needed and n not in copies]:
        with node.graph.inserting_before(node):
            copies[inner] = new = node.graph.node_copy(inner, lambda n: copies[n])
        place_by(new, node, mode)
        new.meta["cp_rewrite"] = "part_flash_attn"
    for out in [*node.users]:  # these nodes stay, as others may know them
        new = copies[outputs_of(body)[0][out.args[1]]]
        out.op, out.target, out.args, out.kwargs = new.op, new.target, new.args, new.kwargs
        new.replace_all_uses_with(out)
        node.graph.erase_node(new)
    node.graph.erase_node(node)


def _ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    while nodes:
        node = nodes.pop()
        found.add(node)
        nodes += [n for n in node.all_input_nodes if n not in found]
    return found


def part_multihead(gm: fx.GraphModule) -> None:
    """Rewrite nodes of `multi_head_attention_forward`, in which `nn.MultiheadAttention` joins projections and
    attention, in a graph and its nested regions: but those whose weights something reads, and those under autocast,
    whose dtypes are not known here. Masks of such a node hide keys where they are true.
    """
    mode = fake_mode_of(gm.graph.nodes)
    for module in graph_modules(gm) if mode is not None else ():
        for node in module.graph.find_nodes(op="call_function", target=F.multi_head_attention_forward):
            _part_multihead(node, mode)


def _part_multihead(node: fx.Node, mode: FakeTensorMode) -> None:
    asked = bind(node)
    read = [user for user in node.users if user.target is not operator.getitem or user.users]
    others = [asked[name] for name in ("bias_k", "bias_v", "static_k", "static_v")]
    if len(read) != 1 or read[0].args != (node, 0) or asked["add_zero_attn"] or others != [None] * 4:
        return
    (out,) = read
    old, tracer = {*node.graph.nodes}, GraphAppendingTracer(node.graph)
    proxied = {name: fx.Proxy(x, tracer) if isinstance(x, fx.Node) else x for name, x in asked.items()}
    last = insert(node, lambda: _attention(proxied), mode, "part_multihead")
    added = [new for new in node.graph.nodes if new not in old]
    if _value(last).dtype != _value(out).dtype:  # autocast
        for new in reversed(added):
            node.graph.erase_node(new)
        return
    for new in added if _value(out).requires_grad else ():
        if any(_value(x).requires_grad for x in new.all_input_nodes if isinstance(_value(x), Tensor)):
            new.meta["example_value"] = tree_map_only(Tensor, Tensor.requires_grad_, _value(new))
    # The node of the output stays, as others may know it.
    out.op, out.target, out.args, out.kwargs = last.op, last.target, last.args, last.kwargs
    for dead in (last, *node.users, node):
        node.graph.erase_node(dead)


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _attention(asked: dict[str, Any]) -> fx.Proxy:
    """The output, (T, B, E), or (T, E) of one row."""
    x = [asked[name] for name in ("query", "key", "value")]
    batched = _value(x[0].node).ndim == 3
    if not batched:
        x = [y.unsqueeze(1) for y in x]
    heads, head_dim = asked["num_heads"], asked["embed_dim_to_check"] // asked["num_heads"]
    q, k, v = (y.unflatten(-1, (heads, head_dim)).permute(1, 2, 0, 3) for y in _projected(x, asked))
    causal = asked["is_causal"] and asked["key_padding_mask"] is None and not asked["need_weights"]
    dropout = asked["dropout_p"] if asked["training"] else 0.0
    mask = _mask(None if causal else asked["attn_mask"], asked["key_padding_mask"], heads, asked["query"])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)  # type: ignore[arg-type]
    out = F.linear(out.permute(2, 0, 1, 3).flatten(2), asked["out_proj_weight"], asked["out_proj_bias"])  # type: ignore[arg-type]
    return out if batched else out.squeeze(1)  # type: ignore[return-value]


def _projected(x: list[Any], asked: dict[str, Any]) -> list[Any]:
    """Queries, keys and values, (T, B, E)."""
    weight, bias = asked["in_proj_weight"], asked["in_proj_bias"]
    biases = (None, None, None) if bias is None else bias.chunk(3)
    if asked["use_separate_proj_weight"]:
        weights = [asked[f"{name}_proj_weight"] for name in "qkv"]
    elif asked["query"].node is asked["key"].node is asked["value"].node:
        joined: Any = F.linear(x[0], weight, bias)
        return [joined.chunk(3, -1)[i] for i in range(3)]
    else:
        weights = [weight.chunk(3)[i] for i in range(3)]
    return [F.linear(y, weights[i], biases[i]) for i, y in enumerate(x)]


def _mask(attn: Any, padding: Any, heads: int, query: fx.Proxy) -> Any:
    """A mask of `scaled_dot_product_attention`, true where a key is seen, or added to logits."""
    if attn is not None and _value(attn.node).ndim == 3:
        attn = attn.unflatten(0, (-1, heads))
    if padding is not None:
        padding = padding.unsqueeze(-2).unsqueeze(-2)
    masks = [mask for mask in (attn, padding) if mask is not None]
    if not masks:
        return None
    flags = [_is_flag(mask) for mask in masks]
    if all(flags):
        seen = [mask.logical_not() for mask in masks]
        return seen[0] if len(seen) == 1 else seen[0].logical_and(seen[1])
    dtype = _value(query.node).dtype
    added = [
        torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf) if flag else mask
        for mask, flag in zip(masks, flags, strict=True)
    ]
    return added[0] if len(added) == 1 else added[0] + added[1]


def _is_flag(mask: fx.Proxy) -> bool:
    """Whether a mask holds flags. A node that was made here has no example yet: its first operand tells."""
    node = mask.node
    while _value(node) is None:
        node = node.all_input_nodes[0]
    return _value(node).dtype is torch.bool


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
