"""Which rows symmetric memory can carry: decided without a GPU."""

from __future__ import annotations

import torch

from cp_rewrite.kernels import peers


def test_row_reasons() -> None:
    assert peers.row_reasons(torch.bfloat16, 8 * 128, 8 * 96) == []
    assert "16-byte chunks" in peers.row_reasons(torch.float16, 12)[0]
    assert "got float64" in peers.row_reasons(torch.float64, 64)[0]


def test_joint_reasons() -> None:
    same = ([], "a host", "a GPU")
    assert peers._joint_reasons([same] * 3) == set()
    found = peers._joint_reasons([same, (["no CUDA device"], "a host", "no GPU"), ([], "another", "a GPU")])
    assert found == {
        "no CUDA device",
        "the ranks are on several hosts",
        "the ranks' GPUs are of several kinds: a GPU, no GPU",
    }
