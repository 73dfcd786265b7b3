"""Checks of a rewritten graph's calls before it runs, and marks of its results.

check_rope       models that are refused while a block is compiled, for their rotary embeddings
CallChecks       arguments are the batch's, and the graph is right for the batch; what is known of results
AgreedInputs     all that must be the same on all ranks
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.fx as fx
from torch import Tensor, nn

from cp_rewrite.agree import turns
from cp_rewrite.batch.active import ActivePlan, is_captured
from cp_rewrite.batch.handed import packing_names
from cp_rewrite.batch.labels import check_shifts, warn_if_unshifted, with_true_count
from cp_rewrite.batch.marks import (
    is_part,
    known_part,
    mark_part,
    mark_token_axes,
    mark_token_dim,
    token_axes_of,
    token_dim_of,
)
from cp_rewrite.batch.padding import PaddingReaders
from cp_rewrite.passes.checks import Unmasked
from cp_rewrite.passes.graph.dynamo import frame_values, input_value, source_name, source_of
from cp_rewrite.passes.graph.nodes import needs_gradient, outputs_of, region_call, region_calls, value_of
from cp_rewrite.passes.graph.tokens import number_places, weight_places
from cp_rewrite.passes.locality.liveness import live_nodes
from cp_rewrite.passes.values.state import State
from cp_rewrite.refusal import Reason, Refusal, RewriteRefused, source_line
from cp_rewrite.sharding import Sharding


def check_rope(sharding: Sharding) -> None:
    """Raise RewriteRefused where the block that is compiled now is of a model whose rotary embeddings have a factor
    that is chosen by length.

        the whole row    max(position_ids) of all tokens        long factor on every rank
        outside          max(position_ids) of a rank's tokens   long on the rank with the row's end, short on the others

    In models whose blocks are compiled one by one `position_embeddings` are made outside of the blocks, where nothing
    is proven: a block is judged by its model's config.
    """
    values = frame_values() if sharding.block_tokens else []
    for module in (part for value in values if isinstance(value, nn.Module) for part in value.modules()):
        for rope_type in _types(module):
            if "dynamic" in rope_type or rope_type in ("longrope", "su"):
                raise RewriteRefused([Refusal(Reason.TOKEN_COUNT, _SAID.format(rope_type))])


def _types(module: nn.Module) -> Iterator[str]:
    config = getattr(module, "config", None)
    for holder in ("rope_parameters", "rope_scaling"):
        yield from _named(getattr(config, holder, None))


def _named(parameters: Any) -> Iterator[str]:
    """Names of kinds; of models with several there is one for each kind of layer."""
    if isinstance(parameters, Mapping):
        yield from (str(parameters[key]) for key in ("rope_type", "type") if parameters.get(key) is not None)
        for of_layers in parameters.values():
            yield from _named(of_layers)


_SAID = (
    "the model's config has rope_type {!r}: its rotary embeddings are scaled by the largest position that they are "
    "given. They are made outside of the blocks (block_tokens), on each rank of its own tokens, so ranks would choose "
    "other factors. Set a rope_type that does not depend on length (for rows within max_position_embeddings 'default' "
    "gives what 'dynamic' does), or compile the model as a whole"
)


class CallChecks:
    """Checks of the calls of one rewritten graph."""

    def __init__(self, state: State) -> None:
        found = state.locality
        self.conditions, self.outputs, self.parts = state.size_conditions, found.outputs, found.parts
        self.axes = found.axes
        self.sums = [source_line(node) for node in found.fill_sums]
        ahead = [site.node for site in state.sites if site.mask.packed and site.mask.looks_ahead]
        self.readers = PaddingReaders(*(tuple(source_line(n) for n in nodes) for nodes in (found.padding_sums, ahead)))
        self.tokens = [(found.place, found.name, found.dim) for found in state.tokens.inputs]
        inputs, packing = state.graph_module.graph.find_nodes(op="placeholder"), state.sharding.packing
        names = [state.tokens.names.get(node, "") for node in inputs]
        self.masks = [(i, state.tokens.masks[node]) for i, node in enumerate(inputs) if node in state.tokens.masks]
        self.tables = [(i, state.tables[node]) for i, node in enumerate(inputs) if node in state.tables]
        self.packing = [(i, name, name) for i, name in enumerate(names) if name in packing_names(state.sharding)]
        self.packing += [(i, state.offsets[x], packing.arg) for i, x in enumerate(inputs) if x in state.offsets]
        self.shared = _shared_inputs(state, inputs)
        self.unmasked = Unmasked.of(state)
        live = live_nodes(state.graph_module, ())
        self.places = {name: i for i, (name, node) in enumerate(zip(names, inputs, strict=True)) if node in live}
        self.moved = _moved_arguments(state)
        trained = [x for x in outputs_of(state.graph_module) if isinstance(x, fx.Node) and needs_gradient(x)]
        # Blocks that are compiled one by one are no whole model: what they don't read, others do.
        whole = not state.sharding.block_tokens
        self.loss_outside = whole and bool(trained) and all(value_of(x).ndim > 0 for x in trained)
        in_place = whole and bool(trained) and not found.reads and bool(state.sites)
        self.sees_own_token = in_place and not any(site.mask.looks_ahead for site in state.sites)

    def check(self, plan: ActivePlan, args: Sequence[Any]) -> None:
        """Raise where a call's arguments are none of the batch's, or where the graph is not right for the batch."""
        handed = plan.handed
        for place, name, dim in self.tokens:
            handed.check_tokens(name, args[place], dim, args[place].shape[dim])
        for place, argument in self.masks:
            handed.check_mask(argument, args[place])
        for place, table in self.tables:
            table.check(args[place])
        for place, name, of in self.packing:
            handed.check_packing(name, args[place], of)
        for place, name in self.shared:
            _check_shared(name, args[place])
        if against := self.unmasked.against(plan.plan):
            raise RewriteRefused(against)
        if self.sums:
            handed.check_full(self.sums)
        handed.check_padding(self.readers)
        check_shifts(handed, self.moved)
        if self.sees_own_token:
            self.sees_own_token = False  # the first call's labels are looked at
            warn_if_unshifted(handed, self.places)
        if self.loss_outside:
            handed.check_unread(self.places)
        if self.conditions and plan.plan.fill:
            self.conditions.check(args, plan.plan.rows[0].total)

    def arguments(self, plan: ActivePlan, args: Sequence[Any]) -> list[Any]:
        """A call's arguments as the graph reads them."""
        read = list(with_true_count(plan.handed, self.places, self.moved, args))
        for place, name, dim in self.tokens:
            read[place] = plan.as_read(name, read[place], dim)
        return read

    def results(self, plan: ActivePlan, out: Sequence[Any]) -> list[Any]:
        """A call's results, with what is known of each: whether it is a part of a sum, and where its tokens are."""
        found = list(out)
        for i, (dim, axes, part) in enumerate(zip(self.outputs, self.axes, self.parts, strict=True)):
            if not isinstance(found[i], Tensor):
                continue
            if dim is not None and self.loss_outside:
                found[i] = plan.without_fill_gradient(found[i], dim)
            mark_part(found[i], part)
            if dim is not None:
                mark_token_dim(found[i], dim)
            elif axes is not None:
                mark_token_axes(found[i], axes)
        return found


def _shared_inputs(state: State, inputs: Sequence[fx.Node]) -> list[tuple[int, str]]:
    """Places and names of tensors that the graph takes for everyone's, parameters left out."""
    apart = {found.node for found in state.tokens.inputs} | {*state.tokens.masks}
    given = [(i, x, source_of(x)) for i, x in enumerate(inputs) if x not in apart and isinstance(value_of(x), Tensor)]
    tensors = [(i, x, source) for i, x, source in given if source is not None]
    return [(i, source_name(source)) for i, x, source in tensors if not isinstance(input_value(x), nn.Parameter)]


def _check_shared(name: str, value: Any) -> None:
    """Raise where an earlier call of a compiled model made a tensor, and it is not what all ranks have."""
    rows = token_dim_of(value) is not None or token_axes_of(value) is not None
    trained = known_part(value) is not None and value.requires_grad and not value.is_leaf
    if rows or is_part(value) or trained:
        what = "tokens" if rows else "part of a sum" if is_part(value) else "gradient"
        raise RuntimeError(
            f"{name} is what an earlier call of a compiled model kept or returned: it has this rank's {what}, and is "
            "read as what all ranks have. Keep sums or means over tokens, detached; tensors of tokens are for the call "
            "that made them, or are named in tokens"
        )


def _moved_arguments(state: State) -> set[str]:
    """Names of arguments of whole numbers whose tokens are moved, or go into what is moved."""
    pending = [read.source for read in state.locality.reads if not value_of(read.source).is_floating_point()]
    seen, calls = set[fx.Node](), region_calls(state.graph_module)
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += node.all_input_nodes
            given = (region_call(call) for call in calls.get(node.graph, ()))
            operands = [call.filled.get(node) for call in given if call is not None]
            pending += [operand for operand in operands if isinstance(operand, fx.Node)]
    return {state.tokens.names[node] for node in seen if node in state.tokens.names}


class AgreedInputs:
    """Checks of one rewritten graph's inputs. Its first call compares everything, later ones what `shard` has not.

    What calls bring beside tokens, weights, buffers and other arguments, must be the same on all ranks. What `shard`
    hands over was compared there. What a caller makes himself, `(local["y"] > 5).float()` for an argument that `tokens`
    does not name, is this rank's own, and the graph takes it for everyone's.

    `weights`: names of weights and buffers -> their places among a call's arguments.
    """

    def __init__(self, state: State) -> None:
        placeholders: Sequence[fx.Node] = state.graph_module.graph.find_nodes(op="placeholder")
        names = state.tokens.names
        apart = {found.node for found in state.tokens.inputs} | {*state.tokens.masks}
        # Masks that the user's word is for are made of each rank's tokens, and compared with that word.
        assumed = {i for mask in state.masks if mask.assumed for i in mask.tensor.places.values()}
        apart |= {node for i, node in enumerate(placeholders) if i in assumed}
        self.weights = weight_places(state.graph_module)
        self._arguments = {names[node]: i for i, node in enumerate(placeholders) if node in names and node not in apart}
        self._arguments |= number_places(state.graph_module)
        self._calls = 0

    @contextmanager
    def or_failed(self, sharding: Sharding) -> Generator[None]:
        """Around what may raise on one rank before `compare`: at the first call the others learn of it there."""
        try:
            yield
        except Exception as error:
            if not self._calls and (self.weights or self._arguments):
                turns.on_failure(sharding, "weights" if self.weights else "arguments", error)
            raise

    def compare(self, plan: ActivePlan, args: Sequence[Any]) -> None:
        """Raise on all ranks where one has other weights, buffers or arguments than the others. A collective of the
        host, of the first call; and of each that brings what the caller made. Of tensors on a GPU, which has to be
        waited for, it is one of the calls 1, 2, 4, 8, ….

        Raises:
            RuntimeError: it names the ranks and what differs.
        """
        if is_captured():
            return
        calls, sharding = self._calls + 1, plan.sharding
        first = calls == 1
        if first and self.weights:
            turns.on_weights(sharding, {name: args[place] for name, place in self.weights.items()})
        given = {name: args[place] for name, place in self._arguments.items()}
        made = {name: value for name, value in given.items() if not plan.handed.is_unchanged(name, value)}
        on_device = any(isinstance(value, Tensor) and value.device.type != "cpu" for value in made.values())
        often = sharding.check_batches and (not on_device or calls & (calls - 1) == 0)
        if (first and given) or (made and often):
            turns.on_arguments(sharding, given if first else made)
        self._calls = calls
