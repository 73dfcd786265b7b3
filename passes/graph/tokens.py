"""The inputs of a graph as the annotation sees them: their arguments' names, and the token axis: which of them carry
tokens, in which dim, and what counts them.

    argument_names, …         which argument of the user's function each placeholder of a Dynamo graph is
    TokenInput, TokenAxis     the token axis
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch import SymInt, Tensor, nn

from cp_rewrite.batch.masks import MaskArgument, mask_argument
from cp_rewrite.refusal import Reason, Refusal
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import expression

from .dynamo import input_value, is_of_module, is_size, source_name, source_of, wrapped_names
from .nodes import guard_equal

_COMPONENT = re.compile(r"""\[(?:'([^']*)'|"([^"]*)"|(-?\d+))\]|\.([A-Za-z_]\w*)""")


def argument_names(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """Placeholder -> the name under which the caller passed it: the last component of its Dynamo source.

        L['input_ids']            -> input_ids
        L['kwargs']['input_ids']  -> input_ids
        L['batch'].doc_ids        -> doc_ids
        L['args'][0]              -> args[0]; behind a decorator of forward the name that forward has for it

    Weights, buffers and sizes are left out. When two arguments end alike, the one nearer to the signature keeps the
    short name and the others get their whole source; on a draw all of them do.
    """
    found: dict[str, list[tuple[int, str, fx.Node]]] = defaultdict(list)
    wrapped = wrapped_names()
    for node in gm.graph.nodes:
        if node.op != "placeholder" or not _is_data(node):
            continue
        source = source_of(node)
        if source is None or is_of_module(source):
            continue
        full = source_name(source)
        short, depth = (wrapped[full], 1) if full in wrapped else _last_component(full)
        found[short].append((depth, full, node))
    names: dict[fx.Node, str] = {}
    for short, entries in found.items():
        nearest = min(depth for depth, _, _ in entries)
        unique = sum(depth == nearest for depth, _, _ in entries) == 1
        for depth, full, node in entries:
            names[node] = short if unique and depth == nearest else full
    return names


def module_numbers(gm: fx.GraphModule) -> list[torch.SymInt | torch.SymFloat]:
    """Numbers that a module holds, and sizes of its weights, where Dynamo made symbols of them."""
    values = [(n.meta.get("example_value"), source_of(n)) for n in gm.graph.find_nodes(op="placeholder")]
    return [v for v, source in values if isinstance(v, torch.SymInt | torch.SymFloat) and is_of_module(source)]


def weight_places(gm: fx.GraphModule) -> dict[str, int]:
    """Where a graph's inputs are weights and buffers of modules: their names -> places."""
    places: dict[str, int] = {}
    for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        source = source_of(node)
        if isinstance(node.meta.get("example_value"), torch.Tensor) and source is not None and is_of_module(source):
            places[source_name(source)] = place
    return places


def number_places(gm: fx.GraphModule) -> dict[str, int]:
    """Where a graph's inputs are numbers that a caller passed, and no sizes of tensors: their names -> places."""
    places: dict[str, int] = {}
    for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        source = source_of(node)
        number = isinstance(node.meta.get("example_value"), torch.SymInt | torch.SymFloat) and source is not None
        if number and not is_of_module(source) and not is_size(source):
            places[_last_component(source_name(source))[0]] = place
    return places


def passed_numbers(gm: fx.GraphModule) -> list[torch.SymInt | torch.SymFloat]:
    """Numbers that a caller passed, and no sizes of tensors, where Dynamo made symbols of them."""
    inputs = gm.graph.find_nodes(op="placeholder")
    return [inputs[place].meta["example_value"] for place in number_places(gm).values()]


def _is_data(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return value is None or (isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter))


def _last_component(full: str) -> tuple[str, int]:
    parts = list(_COMPONENT.finditer(full))
    if not parts:
        return full, 0
    last = parts[-1]
    if last[3] is not None:
        base = _last_component(full[: last.start()])[0]
        return f"{base}[{last[3]}]", len(parts)
    return last[1] or last[2] or last[4], len(parts)


Size = int | SymInt
LOCAL = "cp_rewrite_local"
"""In the meta of an input that looks as long as the row: the fake tensor of what a rank has of it."""


@dataclass(frozen=True)
class TokenInput:
    """One input of a graph that carries tokens.

    Args:
        node: its placeholder. place: among the graph's inputs. name: the argument's.
        dim: its token dim. The rows of the batch are the dim before, where there is one.
    """

    node: fx.Node
    place: int
    name: str
    dim: int

    @property
    def value(self) -> Tensor:
        return self.node.meta["example_value"]

    @property
    def tokens(self) -> Size:
        """How many tokens a row has in the graph."""
        return self.value.shape[self.dim]

    @property
    def local(self) -> Size:
        """How many of them a rank has: as many, where the input was traced as a rank has it."""
        return self.node.meta.get(LOCAL, self.value).shape[self.dim]

    @property
    def rows(self) -> Size:
        """How many rows the batch has."""
        return self.value.shape[self.dim - 1] if self.dim else 1


@dataclass(frozen=True)
class TokenAxis:
    """A graph's inputs, as the annotation describes them.

        input_ids      (B, T)       tokens at dim 1, rows at dim 0
        hidden_states  (B, T, C)    the same
        cu_seqlens     (N + 1,)     global: no token axis

    Sizes are asked of the graph's fake tensors each time: a guard that was put meanwhile makes two symbols one.

    Args:
        names: placeholder -> argument, of all arguments.
        inputs: those that carry tokens, in the graph's order.
        masks: what stands in for masks of the batch, in the graph.
        refusals: what is wrong with those that should.
    """

    names: Mapping[fx.Node, str]
    inputs: tuple[TokenInput, ...]
    refusals: tuple[Refusal, ...]
    masks: Mapping[fx.Node, MaskArgument] = field(default_factory=dict[fx.Node, MaskArgument])

    @staticmethod
    def read(gm: fx.GraphModule, sharding: Sharding, cut: Mapping[str, int] | None = None) -> TokenAxis:
        """The TokenAxis of a captured graph, whose placeholders carry fake tensors and Dynamo's sources.

        `cut`: token dims of all that the batch's cut made, `shift_labels` among it, where there is a batch.
        """
        names, dims = argument_names(gm), {**sharding.tokens, **(cut or {}), **sharding.block_tokens}
        inputs: list[TokenInput] = []
        refusals: list[Refusal] = []
        for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
            name, value = names.get(node, ""), node.meta.get("example_value")
            if name not in dims or not isinstance(value, Tensor):
                continue
            if dims[name] < value.ndim:
                inputs.append(TokenInput(node, place, name, dims[name]))
            else:
                annotated = "block_tokens" if name in sharding.block_tokens else "tokens"
                detail = f"{annotated}[{name!r}] is dim {dims[name]}, but {name} has shape {tuple(value.shape)}"
                refusals.append(Refusal(Reason.TOKEN_INPUT, detail, node))
        if not inputs:
            detail = f"none of the arguments named in tokens ({', '.join(dims)}) reaches the graph"
            refusals.append(Refusal(Reason.TOKEN_INPUT, detail))
        given = {node: mask_argument(input_value(node)) for node in gm.graph.find_nodes(op="placeholder")}
        masks = {node: argument for node, argument in given.items() if argument is not None}
        return TokenAxis(names, tuple(inputs), tuple(refusals), masks)

    @property
    def counts(self) -> frozenset[sympy.Expr]:
        """Numbers of a rank's tokens, in as many symbols as Dynamo gave them; one number in a graph of fixed shapes."""
        return frozenset(expression(found.tokens) for found in self.inputs)

    @property
    def symbols(self) -> set[Any]:
        """Symbols that count a rank's tokens."""
        return {symbol for count in self.counts for symbol in count.free_symbols}

    @property
    def rows(self) -> Size:
        """The rows of the batch, of which some inputs (angles) may hold one for all."""
        return next((found.rows for found in self.inputs if expression(found.rows) != 1), 1)

    @property
    def is_single(self) -> bool:
        """True if a rank has one token, which torch compiles as a fixed size that means nothing."""
        return bool(self.inputs) and all(expression(found.local) == 1 for found in self.inputs)

    def input(self, node: fx.Node) -> TokenInput | None:
        """The input that a placeholder is, where it carries tokens."""
        return next((found for found in self.inputs if found.node is node), None)

    def unified(self) -> TokenAxis:
        """This axis, with guards that all inputs have one number of tokens and of rows; those with another are refused.

        With dynamic shapes each argument has symbols of its own; the guards make them one.
        """
        refusals = list(self.refusals)
        for found in self.inputs:
            first = self.inputs[0]
            if not guard_equal(found.tokens, first.tokens):
                detail = f"{found.name} has {found.tokens} tokens in dim {found.dim}, {first.name} has {first.tokens}"
                refusals.append(Refusal(Reason.TOKEN_INPUT, detail, found.node))
            if not guard_equal(found.rows, self.rows):
                other = next(x for x in self.inputs if expression(x.rows) == expression(self.rows))
                detail = (
                    f"{found.name} has {found.rows} rows of tokens, {other.name} has {self.rows}, whose tokens are dim "
                    f"{other.dim}: expand it before the cut, or name another dim"
                )
                refusals.append(Refusal(Reason.TOKEN_INPUT, detail, found.node))
        for node, argument in self.masks.items():
            for size in () if argument.is_list else node.meta["example_value"].shape[-2:]:
                guard_equal(size, self.inputs[0].tokens)
        if self.is_single:
            detail = (
                "a rank has 1 token, which torch compiles as a fixed size: give ranks more, as by pad_to_multiple=2"
            )
            refusals.append(Refusal(Reason.TOKEN_INPUT, detail))
        return replace(self, refusals=tuple(refusals))
