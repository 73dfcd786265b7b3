"""How far a result may be from its oracle, by dtype and by the number of terms it sums. Written once."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor, terms: Tensor | None = None) -> float:
    """Norm of the difference over the norm of the expected, in fp64.

    Inputs of the tests are of order one, so an expected norm below 0.01 per element counts as that: a gradient that is
    zero in exact arithmetic comes out as the rounding of the terms that cancel. `terms`: those that are summed, of
    numbers that each were rounded; an expected norm below theirs counts as that, for rounding changes the sum by eps
    times the root of their sum of squares, however much of them cancels.
    """
    actual, expected = actual.detach().double(), expected.detach().double()
    floor = max(1e-2 * expected.numel() ** 0.5, 0.0 if terms is None else float(terms.detach().double().norm()))
    return float((actual - expected).norm() / expected.norm().clamp_min(floor)) if expected.numel() else 0.0


def tolerance(dtype: torch.dtype, terms: int = 1024) -> float:
    """Relative norm error that rounding explains: eps · sqrt(terms), with room for a chain of a few such sums.

    For fp32 and rows of up to 4096 tokens this stays below 1e-5.
    """
    eps = {torch.float64: 2.2e-16, torch.float32: 6.0e-8, torch.bfloat16: 3.9e-3, torch.float16: 4.9e-4}[dtype]
    # Inputs of half precision are rounded once; sums run in fp32.
    return 2 * eps * terms**0.5 if dtype in (torch.float64, torch.float32) else 4 * eps


def assert_close(actual: Tensor, expected: Tensor, terms: int = 1024, what: str = "") -> None:
    """Equal up to rounding, by relative norm; NaN never passes."""
    error = relative_error(actual, expected)
    limit = tolerance(expected.dtype, terms)
    assert error <= limit, f"{what}: relative error {error:.2e} > {limit:.2e}"
