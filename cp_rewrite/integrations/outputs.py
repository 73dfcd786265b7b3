"""What a rank's model returns, with the values of one process and gradients for what averages over ranks."""

from __future__ import annotations

from torch import Tensor

from cp_rewrite.batch.active import is_part
from cp_rewrite.batch.token_mean import token_mean
from cp_rewrite.sharding import Sharding


def whole(value: Tensor, sharding: Sharding) -> Tensor:
    """An output with the value that one process has, if it is a sum over tokens. Its gradient is this rank's part."""
    if is_part(value) and value.is_floating_point():
        return token_mean(value, float(sharding.rank == 0), sharding)
    return value


def scaled(value: Tensor, factor: int) -> Tensor:
    """The same with `factor` times its gradient: an alias, as other outputs may be computed from the tensor itself."""
    if factor == 1 or not value.requires_grad:
        return value
    alias = value.view_as(value)
    vars(alias).update(vars(value))  # what is known of its tokens
    alias.register_hook(lambda grad: None if grad is None else grad * factor)  # pyright: ignore[reportUnknownLambdaType]
    return alias
