"""The largest logits per head of compiled models. Under every exchange, mask and padding the ops' part is in each
conformance cell."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import cp_rewrite as cp
from cp_rewrite.kernels import reference
from cp_rewrite.kernels.select import Params, Tables
from cp_rewrite.masks import PackedMask
from cp_rewrite.ops.max_logits import note, watch_batch
from tests.helpers.conformance_cells import PACKS
from tests.helpers.packed import dense_logits, make_schedule, tensors
from tests.helpers.packed_model import HEADS, TOKENS, WIDTH, PackedModel, packed_batch
from tests.helpers.pool import Pool

PACKING = cp.DocumentIds("doc_ids")


class Attention(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Two attentions in one module."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.qkv, self.scale = nn.Linear(WIDTH, 3 * WIDTH), scale

    def forward(self, h: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        once = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        twice = F.scaled_dot_product_attention(k, q, once, attn_mask=mask, scale=2 * self.scale)
        return h + twice.transpose(1, 2).flatten(2)


class Layers(PackedModel):
    """Two layers, the second in a checkpoint, before the model's own attention."""

    def extra(self) -> None:
        self.layers = nn.ModuleList([Attention(2.0), Attention(0.1)])

    def attended(self, h: Tensor, mask: Tensor | None, angles: Tensor | None = None) -> Tensor:
        h = self.layers[0](h, mask)
        h = checkpoint(self.layers[1], h, mask, use_reentrant=False)  # type: ignore[assignment]
        return super().attended(h, mask, angles)


SITES = ["layers.0", "layers.0#2", "layers.1", "layers.1#2", "attention"]


def expected(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The largest logits of the plain model on one process, by the order of its calls."""
    found: list[Tensor] = []
    plain = F.scaled_dot_product_attention

    def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, scale: float | None = None) -> Tensor:
        logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        found.append(logits.masked_fill(~attn_mask, -torch.inf).amax((0, 2, 3)))
        return plain(q, k, v, attn_mask=attn_mask, scale=scale)

    with torch.no_grad(), mock.patch.object(F, "scaled_dot_product_attention", attention):
        Layers().double()(**batch)
    return dict(zip(SITES, found, strict=True))


def largest(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {site: torch.stack([each[site] for each in found]).amax(0) for site in SITES}


def steps(mesh: DeviceMesh, batches: list[dict[str, Tensor]], how: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The largest logits after each batch, and after two more at once. No batch compiles anew."""
    if how["exchange"].startswith("a2a+"):
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("outer", "inner"))
    sharding = cp.Sharding(mesh, TOKENS, PACKING, **how)
    torch._dynamo.reset()
    model = Layers().double()
    compiled: Any = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    found: list[dict[str, Tensor]] = []
    for number, batch in enumerate([*batches, *batches[:2]]):
        evaluates = number == 1  # in inference mode, which is another graph
        with torch._dynamo.config.patch(error_on_recompile=number > 1), sharding.shard(batch) as local:
            with torch.inference_mode(evaluates):
                loss = compiled(**local)
            if not evaluates:
                loss.backward()
        if number != len(batches):
            found.append(cp.max_logits(sharding))
    return found


BATCHES = [packed_batch(1, tokens) for tokens in (23, 17, 31)]
HOWS: tuple[dict[str, Any], ...] = (
    {"exchange": "needed", "inner": "aot_eager"},
    {"exchange": "p2p", "layout": "head_tail"},
    {"exchange": "a2a", "layout": "contiguous"},
    {"exchange": "all_gather", "layout": "dual_chunk", "capacity": cp.Capacity(8, 16, 128)},
    {"exchange": "all_gather", "exchange_at": "narrowest"},
)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("ranks", "how"), [(4, {"exchange": "a2a+needed"}), *((2, how) for how in HOWS)], ids=lambda x: str(x)
)
def test_they_are_those_of_one_process(pool: Pool, ranks: int, how: dict[str, Any]) -> None:
    same = {**BATCHES[0], "input_ids": BATCHES[0]["input_ids"].flip(1)}
    batches = [BATCHES[0], same, same] if "capacity" in how else BATCHES
    alone = [expected(batch) for batch in batches]
    results = pool.run(ranks, steps, batches, {"inner": "eager", "max_logits": True, **how})
    for found in results:
        assert len(found) == len(batches) + 1
        for got, want in zip(found, [*alone, largest(alone[:2])], strict=True):
            assert got.keys() == {*SITES}
            for site in SITES:
                torch.testing.assert_close(got[site], want[site], rtol=1e-9, atol=1e-9, msg=f"{site} {how}")


def test_every_nth_batch(pool: Pool) -> None:
    alone = [expected(batch) for batch in BATCHES]
    for found in pool.run(2, steps, BATCHES, {"inner": "eager", "max_logits": 2, "exchange": "needed"}):
        assert found[1] == {}
        for number, want in ((0, alone[0]), (2, alone[2]), (3, alone[1])):
            assert found[number].keys() == want.keys()
            for site in SITES:
                torch.testing.assert_close(found[number][site], want[site], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("blocks", [1, 1 << 22], ids=["one_row", "whole"])
def test_blocks_of_any_size_find_the_same(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    monkeypatch.setattr(reference, "_BLOCK", blocks)
    rows, mask, params = PACKS["between"], PackedMask(causal=False, window=(2, 1)), Params(0.7, 1.5)
    q, k = (torch.randn(rows[0].total, heads, 8, dtype=torch.float64) for heads in (4, 2))
    schedule, _ = make_schedule(rows, 1, "contiguous", mask)
    tables, route = tensors(schedule, 0, "local")
    found = reference.max_logits(q, k[route[0].long()], Tables(*tables), params)
    torch.testing.assert_close(found, dense_logits(q, k, rows, mask, params).amax((1, 2)))


def test_what_is_asked_for_in_vain() -> None:
    watched = cp.Sharding(1, TOKENS, PACKING, max_logits=True)
    assert cp.max_logits(watched) == {}
    with pytest.raises(ValueError, match="max_logits=True"):
        cp.max_logits(cp.Sharding(1, TOKENS, PACKING))
    with pytest.raises(ValueError, match="dry runs"):
        cp.max_logits(cp.Sharding(2, TOKENS, PACKING, max_logits=True))
    for value, error in (("no", TypeError), (0, ValueError)):
        with pytest.raises(error, match="max_logits"):
            cp.Sharding(1, TOKENS, PACKING, max_logits=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="captured step"):
        cp.Sharding(1, TOKENS, PACKING, capacity=cp.Capacity(2, 2, 8), max_logits=2)
    with pytest.raises(ValueError, match="block_tokens"):
        cp.Sharding(1, TOKENS, PACKING, block_tokens={"h": 1}, max_logits=True)
    schedule, _ = make_schedule(PACKS["none"], 1, "contiguous", PackedMask())
    tables = Tables(*tensors(schedule, 0, "local")[0])
    with watch_batch(watched):
        for heads in (2, 3):
            q = torch.zeros(schedule.local_rows, heads, 4)
            k = torch.zeros(int(schedule.expanded[0]), heads, 4)
            with pytest.raises(ValueError, match="two models") if heads == 3 else mock.MagicMock():
                note("site", q, k, tables, Params(1.0))
    assert cp.max_logits(watched)["site"].tolist() == [0, 0]
