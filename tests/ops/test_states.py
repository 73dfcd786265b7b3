"""Recurrences over whole rows beside a walk over tokens in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.library import opcheck

from tests.helpers.recurrences import KINDS, inputs_of, options_of, oracle

ops: Any = torch.ops.cp_rewrite


def len_of(lengths: list[int] | None) -> str:
    return "row" if lengths is None else f"{len(lengths)} documents"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "lengths", [None, [0, 1, 7, 64, 0, 65, 3], [129], [1] * 30], ids=["row", "mixed", "one", "ones"]
)
def test_results_and_gradients_are_those_of_a_walk_over_tokens(kind: str, lengths: list[int] | None) -> None:
    rows, tokens = (2, 71) if lengths is None else (1, sum(lengths) + 5)
    bounds = None if lengths is None else [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    offsets = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    inputs = [x.requires_grad_() for x in inputs_of(kind, rows, tokens)]
    out = getattr(ops, kind)(*inputs, offsets, *options_of(kind))
    expected = oracle(kind, inputs, bounds)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(out)
    found = torch.autograd.grad((out * weight).sum(), inputs)
    for ours, theirs in zip(found, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_strong_decay_neither_overflows_nor_loses_digits(kind: str) -> None:
    inputs = inputs_of(kind, 1, 130, dtype=torch.float32)
    inputs[1 if kind in ("ssd", "selective_scan") else 3].mul_(40)
    out = getattr(ops, kind)(*inputs, None, *options_of(kind))
    torch.testing.assert_close(out.double(), oracle(kind, inputs, None), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_may_go_over_rows_of_the_batch(kind: str) -> None:
    inputs = inputs_of(kind, 2, 9)
    out = getattr(ops, kind)(*inputs, torch.tensor([0, 4, 15], dtype=torch.int32), *options_of(kind))
    torch.testing.assert_close(out, oracle(kind, inputs, [0, 4, 15]), rtol=1e-10, atol=1e-10)
    assert not out.flatten(0, 1)[15:].any()


@pytest.mark.parametrize("offsets", [[1, 4], [0, 5, 3], [0, 10]])
def test_offsets_that_are_none_are_errors(offsets: list[int]) -> None:
    inputs = inputs_of("ssd", 1, 9)
    with pytest.raises(ValueError, match="offsets must ascend from 0 up to at most 9 rows"):
        ops.ssd(*inputs, torch.tensor(offsets, dtype=torch.int32))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ops_pass_opcheck(kind: str) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        inputs = [x.requires_grad_() for x in inputs_of(kind, 1, 9, dtype=dtype)]
        opcheck(getattr(ops, kind).default, (*inputs, torch.tensor([0, 4, 9], dtype=torch.int32), *options_of(kind)))


@pytest.mark.slow
def test_numbers_are_those_of_transformers() -> None:
    jamba = pytest.importorskip("transformers.models.jamba.modeling_jamba").mamba_selective_scan
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2").mamba2_chunk_scan
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear").chunk_kimi_delta_attention
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next").torch_chunk_gated_delta_rule
    for kind, delta in (("gated_delta_rule", qwen), ("kimi_delta", kimi)):
        q, k, v, g, beta = inputs_of(kind, 2, 150, dtype=torch.float32)
        q, k = (x.expand(-1, -1, 2, -1) for x in (q, k))
        expected = delta(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
        _assert_close(getattr(ops, kind)(q, k, v, g, beta, None, 0.5, True), expected)
    inputs = inputs_of("ssd", 2, 150, dtype=torch.float32)
    _assert_close(ops.ssd(*inputs, None), mamba2(*inputs, chunk_size=32))
    x, dt, rate, b, c = inputs_of("selective_scan", 2, 150, dtype=torch.float32)
    expected = jamba(x.mT, dt.mT, rate, b.mT, c.mT).mT
    _assert_close(ops.selective_scan(x, dt, rate, b, c, None), expected)


def _assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
