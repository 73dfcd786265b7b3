"""`gather_outputs=True` puts outputs into global order that carry tokens by the proof, whatever their sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite.batch.marks import mark_token_axes
from cp_rewrite.batch.tokens import gathered
from tests.helpers.pool import Pool
from tests.helpers.tolerances import relative_error

TOKENS = 23
"""Tokens of a row. Each of two ranks has 12 rows, one of all 24 without a token: as many as the vocabulary has."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.head = nn.Linear(32, TOKENS // 2 + 1)

    def forward(self, input_ids: Tensor, doc_ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids).unflatten(-1, (2, 16)).transpose(1, 2)
        mask = (doc_ids[:, None, :, None] == doc_ids[:, None, None, :]).tril()
        y = F.scaled_dot_product_attention(x, x, x, attn_mask=mask).transpose(1, 2).flatten(2)
        logits = self.head(y)
        return {
            "logits": logits,
            "by_vocabulary": logits.transpose(1, 2),
            "rows_flattened": logits.flatten(0, 1),
            "tokens_first": logits.transpose(0, 1),
            "rows_of_tokens_flattened": logits.transpose(0, 1).flatten(0, 1),
            "entries_flattened": logits.flatten(1),
            "all_flattened": logits.transpose(1, 2).flatten(),
            "weights": self.head.weight.detach() * 2,
            "largest": logits.amax(-1),
        }


def gathered_on(mesh: DeviceMesh, rows: int) -> dict[str, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Model()
    doc_ids = (torch.arange(TOKENS) // 10).expand(rows, -1)
    batch = {"input_ids": torch.randint(16, (rows, TOKENS)), "doc_ids": doc_ids}
    expected = model(**batch)
    sharding = cp.Sharding(
        mesh, {"input_ids": 1, "doc_ids": 1}, cp.DocumentIds("doc_ids"), inner="eager", layout="head_tail"
    )
    outputs = cp.context_parallel(sharding, gather_outputs=True)(model)(**batch)
    return {name: (x.detach(), outputs[name].detach()) for name, x in expected.items()}


@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_outputs_are_gathered_by_their_token_dim(pool: Pool, rows: int) -> None:
    for outputs in pool.run(2, gathered_on, rows):
        for name, (expected, found) in outputs.items():
            assert found.shape == expected.shape, name
            assert relative_error(found, expected) < 1e-5, name


def test_tokens_of_one_row_of_several_are_not_gathered() -> None:
    value = torch.ones(4, 3)
    mark_token_axes(value, (("T",), None))
    sharding = cp.Sharding(2, {"input_ids": 1, "doc_ids": 1}, cp.DocumentIds("doc_ids"))
    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "doc_ids": torch.zeros(2, 8, dtype=torch.long)}
    with sharding.shard(batch), pytest.raises(ValueError, match="one row of the batch, which holds 2"):
        gathered(sharding, value)
