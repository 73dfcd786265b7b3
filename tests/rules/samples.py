"""Arguments to try ops on: those that torch tests its ops with, `dim=None`, negative dims, `keepdim` and all."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

DTYPES = (torch.float64, torch.int64, torch.bool)
LEFT_OUT = {
    "empty": "what it holds is not defined", "bernoulli": "draws", "multinomial": "draws", "normal": "draws",
    "uniform": "draws", "exponential": "draws", "cauchy": "draws", "geometric": "draws", "log_normal": "draws",
    "randn": "draws", "rand": "draws", "randint": "draws", "dropout": "draws", "rrelu": "draws",
    "gumbel_softmax": "draws", "fractional_max_pool": "draws", "pca_lowrank": "draws", "svd_lowrank": "draws",
    "attention": "is attention, which is matched", "flex": "is attention, which is matched",
    "linalg": "of matrices that a dim of tokens is no part of", "sparse": "of other layouts", "jiterator": "of CUDA",
    "combinations": "picks by a mask inside",
    "cholesky": "as linalg", "ormqr": "as linalg", "lu": "as linalg", "geqrf": "as linalg", "svd": "as linalg",
    "to_sparse": "of other layouts", "block_diag": "slow", "cartesian_prod": "slow", "_segment_reduce": "no autograd",
    "hash_tensor": "no numbers", "resize": "what it holds is not defined", "stft": "slow", "histogramdd": "slow",
    "istft": "slow",
}  # fmt: skip
"""Whole words of a name (`lu_solve`, not `relu`) -> why such ops are not tried."""
_LEFT_OUT = re.compile(rf"(?<![a-z])({'|'.join(LEFT_OUT)})(?![a-z])")


@dataclass(frozen=True)
class Sample:
    """A call of an op. op: its name in torch's table. writes: into its first tensor, a copy."""

    op: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    writes: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def __str__(self) -> str:
        args = [_text(a) for a in self.args] + [f"{name}={_text(a)}" for name, a in self.kwargs.items()]
        return f"{self.op}{'_' * self.writes}({', '.join(args)})"


@lru_cache
def ops() -> dict[str, Any]:
    """The ops to try, by name."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    setattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)  # which that import forbids
    return {
        f"{op.name}.{op.variant_test_name}".rstrip("."): op
        for op in op_db
        if not _LEFT_OUT.search(op.name) and any(op.supports_dtype(d, "cpu") for d in DTYPES)
    }


def samples(name: str) -> Iterator[Sample]:
    """An op's samples, of the first of DTYPES that it takes; each in place too, where the op has such a form."""
    op = ops()[name]
    dtype = next(d for d in DTYPES if op.supports_dtype(d, "cpu"))
    torch.manual_seed(zlib.crc32(name.encode()))
    for each in op.sample_inputs("cpu", dtype):
        sample = Sample(name, op.op, (each.input, *each.args), each.kwargs)
        if sample.tensors and "out" not in each.kwargs and all(map(_is_plain, sample.tensors)):
            yield sample
            if op.inplace_variant and isinstance(each.input, Tensor):
                yield replace(sample, function=op.inplace_variant, writes=True)


def _is_plain(x: Tensor) -> bool:
    """True if a tensor is strided, finite and not empty."""
    return x.layout is torch.strided and x.numel() > 0 and bool(x.isfinite().all())


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype)[6:]}{[*value.shape]}".replace("float64", "")
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    return str(value)
