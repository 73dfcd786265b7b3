"""Rotary embeddings whose factor is chosen by length, in models whose blocks are compiled one by one.

    the whole row    max(position_ids) of all tokens        long factor on every rank
    outside          max(position_ids) of a rank's tokens   long on the rank with the row's end, short on the others

`position_embeddings` are made outside of the blocks, where nothing is proven: a block is judged by its model's config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from cp_rewrite.passes.graph.dynamo_frame import frame_call
from cp_rewrite.refusal import Reason, Refusal, RewriteRefused
from cp_rewrite.sharding import Sharding


def check_rope(sharding: Sharding) -> None:
    """Raise RewriteRefused where the block that is compiled now is of a model that chooses so."""
    call = frame_call(lambda values: values) if sharding.block_tokens else None
    if call is None:
        return
    function, args, kwargs = call
    values = [*args, *kwargs.values(), *(cell.cell_contents for cell in function.__closure__ or ())]
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
