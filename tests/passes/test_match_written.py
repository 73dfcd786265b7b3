"""Attention that is written out as products and a softmax: its spellings are read, and give what they gave."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from cp_rewrite import PackedMask, Reason
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.match.find_sites import match_sites
from cp_rewrite.passes.values.state import Site
from tests.helpers.matching import BATCH, PACKED, heads, match_each, reasons, the_site
from tests.helpers.pool import Pool
from tests.passes.mask_spellings import DOCUMENTS, annotate, make_batch
from tests.passes.written_spellings import (
    SPELLINGS,
    Attention,
    Written,
    by_factor_sinks,
    capped,
    checkpointed_sinks,
    chosen,
    filled,
    filled_behind_its_back,
    filled_twice,
    in_place,
    merged,
    scaled_queries,
    tokens_first,
    two_masks,
    with_sinks,
)

pytestmark = pytest.mark.long


def run(model: Written, batch: Mapping[str, Tensor], inner: Any = "eager") -> tuple[list[Site], list[Tensor]]:
    """The sites of a rewritten model, and what it gives."""
    sharding = cp.Sharding(1, dict.fromkeys(batch, 1), DOCUMENTS, inner=inner, verify="first_step")
    sites: list[Site] = []

    def backend(gm: Any, inputs: Any) -> Any:
        sites.extend(match_sites(gm, sharding, TokenAxis.read(gm, sharding).unified()).sites)
        return cp.backend(sharding)(gm, inputs)

    torch._dynamo.reset()
    with sharding.shard(batch) as local:
        found = torch.compile(model, backend=backend, fullgraph=True)(**local)
    outs = found if isinstance(found, list) else [found]
    return sites, [sharding.unshard(out.transpose(1, 2), 1).transpose(1, 2) for out in outs]


def compare(model: Written, found: Tensor, expected: Tensor, again: bool = False) -> None:
    """again: other outputs of the same graph are still to be compared."""
    assert torch.allclose(found, expected, atol=1e-5)
    values = [*model.parameters()]
    grads = [
        torch.autograd.grad(y.sin().sum(), values, retain_graph=again, allow_unused=True) for y in (found, expected)
    ]
    for grad, whole in zip(*grads, strict=True):
        assert (grad is None) == (whole is None)
        assert grad is None or whole is None or torch.allclose(grad, whole, atol=1e-4)


Together = tuple[Written, list[Site], list[Tensor], list[Tensor]]


@pytest.fixture(scope="module")
def together() -> Together:
    """All spellings in one graph: the model, its sites, what it gives rewritten and as it is."""
    model = Written(*SPELLINGS)
    batch = {name: BATCH[name] for name in ("input_ids", "doc_ids")}
    return model, *run(model, batch), model(**batch)


@pytest.mark.parametrize("attend", SPELLINGS)
def test_spellings_are_read_and_give_what_they_gave(together: Together, attend: Attention) -> None:
    model, sites, found, expected = together
    assert len(sites) == len(SPELLINGS)
    number = SPELLINGS.index(attend)
    site = sites[number]
    assert site.mask == (PackedMask(window=(2, 0)) if attend in (two_masks, filled_twice) else PackedMask())
    assert site.scale == (1.0 if attend in (scaled_queries, filled_behind_its_back) else pytest.approx(0.5))
    assert site.softcap == pytest.approx(3.0 if attend is capped else 0.0)
    assert site.heads_of(site.key) == 2
    assert site.form == ("BTHD" if attend is tokens_first else "BHTD")
    assert (site.sinks is not None) == (attend in (with_sinks, by_factor_sinks))
    compare(model, found[number], expected[number], again=True)


def test_a_rank_may_have_as_many_tokens_as_a_head_has_dims() -> None:
    """Sizes that happen to be equal stay apart."""
    for site in match_each(Written(in_place, by_factor_sinks), batch=make_batch([[1, 3], [2, 2]])):
        assert isinstance(site, Site)
        assert site.mask.packed


@pytest.mark.parametrize(("attend", "kv_heads", "inner"), [(chosen, 1, "eager"), (checkpointed_sinks, 2, "aot_eager")])
def test_one_spelling_gives_what_it_gave(attend: Attention, kv_heads: int, inner: str) -> None:
    model = Written(attend, kv_heads=kv_heads)
    batch = {name: BATCH[name] for name in ("input_ids", "doc_ids")}
    (found,) = run(model, batch, inner)[1]
    compare(model, found, model(**batch))


def step_of_rank(mesh: DeviceMesh, layout: Any, exchange: Any, attend: Any) -> dict[str, Tensor]:
    sharding = cp.Sharding(mesh, {"input_ids": 1, "doc_ids": 1}, DOCUMENTS, layout, exchange, inner="eager")
    model = Written(attend)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard({name: BATCH[name] for name in sharding.tokens}) as local:
        out = compiled(**local).transpose(1, 2)
    whole = sharding.unshard(out, 1)
    (out.sin() * local.has_token[..., None, None]).sum().backward()
    cp.sum_gradients(model.parameters(), sharding)
    return {"out": whole.detach(), "grad": model.table.weight.grad}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("layout", "exchange", "attend"), [("balanced", "needed", tokens_first), ("contiguous", "a2a", merged)]
)
def test_other_forms_on_two_ranks(pool: Pool, layout: str, exchange: str, attend: Attention) -> None:
    model = Written(attend)
    out = model(**BATCH).transpose(1, 2)
    out.sin().sum().backward()
    for found in pool.run(2, step_of_rank, layout, exchange, attend):
        torch.testing.assert_close(found["out"], out.detach())
        torch.testing.assert_close(found["grad"], model.table.weight.grad)


def with_keys_of_one_head(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return filled(q, k[:, :1] + 0, v[:, :1] + 0, keep)


def test_products_broadcast_one_head() -> None:
    assert the_site(Written(with_keys_of_one_head)).key.meta["example_value"].shape[1] == 1


def test_no_mask_sees_the_whole_row() -> None:
    site = the_site(Written(lambda q, k, v, keep: (q @ k.mT).softmax(-1) @ v))
    assert site.mask == PackedMask(causal=False, packed=False)


def test_a_mask_that_comes_in_needs_the_users_word() -> None:
    def model(mask: Tensor, **b: Tensor) -> Tensor:
        x = heads(b)
        return (x @ x.mT + mask).softmax(-1) @ x

    batch = {**BATCH, "mask": torch.zeros(2, 1, 12, 12)}
    assert reasons(model, batch=batch) == {Reason.MASK_OPAQUE}
    assert the_site(model, annotate(DOCUMENTS, assume_mask=PackedMask()), batch=batch).assumed


def of_one_row(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, written: bool) -> Tensor:
    """(H, T, D)."""
    q, k, v = q[0], k[0], v[0]
    if not written:
        return F.scaled_dot_product_attention(q, k, v, keep[0], scale=0.5)[None]
    return (torch.bmm(q, k.mT) * 0.5).masked_fill(~keep[0], -math.inf).softmax(-1).bmm(v)[None]


def of_one_head(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, written: bool) -> Tensor:
    """(B, T, D)."""
    q, k, v = (x[:, 1] for x in (q, k, v))
    if not written:
        return F.scaled_dot_product_attention(q, k, v, keep[:, 0], scale=0.5)[:, None]
    return ((q @ k.transpose(1, 2) * 0.5).masked_fill(~keep[:, 0], -math.inf).softmax(2) @ v)[:, None]


@pytest.mark.parametrize("attend", [of_one_row, of_one_head])
def test_attention_of_three_dims(attend: Callable[..., Tensor]) -> None:
    def as_node(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return attend(q, k, v, keep, False)

    def written_out(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return attend(q, k, v, keep, True)

    model = Written(as_node, written_out)
    rows = 1 if attend is of_one_row else 2
    batch = {name: BATCH[name][:rows] for name in ("input_ids", "doc_ids")}
    sites, found = run(model, batch)
    assert len(sites) == 2
    for each, expected in zip(found, model(**batch), strict=True):
        compare(model, each, expected, again=True)


def test_a_softmax_over_features_is_no_attention() -> None:
    def model(**b: Tensor) -> Tensor:
        x = heads(b)
        gate = x.softmax(-1)
        return F.scaled_dot_product_attention(x, x, gate, PACKED(**b))

    assert the_site(model).mask == PackedMask()


def test_heads_repeated_before_the_key_changes_stay() -> None:
    def model(**b: Tensor) -> Tensor:
        k = heads(b, 2) + 1.0
        repeated = k.repeat_interleave(3, 1)
        k.mul_(2.0)
        return F.scaled_dot_product_attention(heads(b, 6), repeated, repeated, PACKED(**b))

    assert the_site(model).key.meta["example_value"].shape[1] == 6


def test_heads_repeated_without_gradients_stay() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        with torch.no_grad():
            k = k[:, :2].repeat_interleave(2, 1)
        return F.scaled_dot_product_attention(q, k, v, keep)

    assert the_site(Written(attend)).key.meta["example_value"].shape[1] == 4
