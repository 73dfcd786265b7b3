"""What a graph's calls bring beside tokens must be the same on all ranks: weights, buffers and other arguments.

What `shard` hands over was compared there. What a caller makes himself, `(local["y"] > 5).float()` for an argument that
`tokens` does not name, is this rank's own, and the graph takes it for everyone's.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.fx as fx
from torch import Tensor

from cp_rewrite.batch import agree
from cp_rewrite.batch.active.current import is_captured
from cp_rewrite.batch.active.plan import ActivePlan
from cp_rewrite.passes.graph.argument_names import number_places, weight_places
from cp_rewrite.passes.values.state import State
from cp_rewrite.sharding import Sharding


class AgreedInputs:
    """Checks of one rewritten graph's inputs. Its first call compares everything, later ones what `shard` has not.

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
                agree.on_failure(sharding, "weights" if self.weights else "arguments", error)
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
            agree.on_weights(sharding, {name: args[place] for name, place in self.weights.items()})
        given = {name: args[place] for name, place in self._arguments.items()}
        made = {name: value for name, value in given.items() if not plan.is_as_handed(name, value)}
        often = sharding.check_batches and (_on_host(made) or calls & (calls - 1) == 0)
        if (first and given) or (made and often):
            agree.on_arguments(sharding, given if first else made)
        self._calls = calls


def _on_host(values: Mapping[str, Any]) -> bool:
    return not any(isinstance(value, Tensor) and value.device.type != "cpu" for value in values.values())
