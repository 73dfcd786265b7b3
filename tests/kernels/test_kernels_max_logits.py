"""The kernel of the largest logits beside the reference, on a GPU."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from cp_rewrite.kernels import reference
from cp_rewrite.kernels.select import Params, Tables
from cp_rewrite.ops.max_logits import _kernel
from tests.helpers.conformance_cells import LONG_PACKS, MASKS, PACKS
from tests.helpers.packed import make_schedule, tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SHAPES = (((8, 2), 128), ((3, 3), 64), ((4, 1), 192), ((6, 2), 40), ((2, 2), 256), ((2, 1), 576))


@pytest.mark.parametrize("padding", [*PACKS, *LONG_PACKS])
def test_the_kernel_finds_what_the_reference_finds(padding: str) -> None:
    """Under every mask, with NaN in every row that no piece reads, and without a sync once it is compiled."""
    rows, draw = (PACKS | LONG_PACKS)[padding], random.Random(0)
    for mask, (((heads, heads_kv), dim), dtype) in zip(
        MASKS, itertools.cycle(itertools.product(SHAPES, (torch.bfloat16, torch.float16))), strict=False
    ):
        if mask.spans and mask.window is not None and padding in LONG_PACKS:
            mask = replace(mask, window=(200, 0))  # as long as the pack's spans
        schedule, _ = make_schedule(rows, 2, draw.choice(["balanced", "dual_chunk"]), mask)
        tables, _ = tensors(schedule, 1, "all_gather")
        expanded, params = int(schedule.expanded[1]), Params(0.3, draw.choice([0.0, 20.0]))
        q = torch.randn(schedule.local_rows, heads, 2 * dim, device="cuda").to(dtype)[..., :dim]
        k = torch.randn(expanded + 3, 2 * heads_kv, dim, device="cuda").to(dtype)[:, :heads_kv]
        k[expanded:] = torch.nan
        read = torch.zeros(schedule.local_rows, dtype=torch.bool)
        for q0, q1, k0, k1, *_ in tables[2].tolist():
            read[q0:q1] = k1 > k0
        q[~read.cuda()] = torch.nan
        on_device = Tables(tables[0].cuda(), tables[1].cuda(), *tables[2:])
        expected = reference.max_logits(q, k, on_device, params)
        for mode in ("default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            try:
                found = _kernel().max_logits(q, k, on_device, params)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=f"{padding} {mask} {heads} {dim} {dtype}")


def test_nan_is_found() -> None:
    schedule, _ = make_schedule(LONG_PACKS["dense"], 1, "contiguous", MASKS[0])
    tables, _ = tensors(schedule, 0, "all_gather")
    q, k = (torch.randn(schedule.local_rows, 2, 64, device="cuda").bfloat16() for _ in range(2))
    k[700, 1] = torch.nan
    found = _kernel().max_logits(q, k, Tables(tables[0].cuda(), tables[1].cuda(), *tables[2:]), Params(1.0))
    assert found.isnan().tolist() == [False, True]
