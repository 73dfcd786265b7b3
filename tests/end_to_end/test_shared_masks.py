"""Spans, prefixes and trees: loss and all gradients of a sharded model against the plain one on one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import cp_rewrite as cp
from tests.end_to_end.test_end_to_end import EXCHANGES, LAYOUTS, LIMIT, grid_mesh
from tests.helpers.one_process import step_of_ranks
from tests.helpers.pool import Pool

ARGS = ("input_ids", "position_ids", "doc_ids", "first", "second", "labels", "old_logp", "advantages")
TOKENS: dict[str, int] = dict.fromkeys(ARGS, 1)
VOCAB, WIDTH, HEADS = 23, 16, 2


def of_query(x: Tensor) -> Tensor:
    return x[:, None, :, None]


def of_key(x: Tensor) -> Tensor:
    return x[:, None, None, :]


def causal(x: Tensor) -> Tensor:
    i = torch.arange(x.shape[1])
    return i[:, None] >= i[None, :]


def spans(doc: Tensor, ids: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    own = (of_query(ids) == of_key(ids)) & (of_query(ids) > 0)
    i = torch.arange(doc.shape[1])
    near = i[:, None] - i[None, :] < 9
    same = of_query(doc) == of_key(doc)
    return same & (causal(doc) | own), same & ((causal(doc) & near) | own)


def images(doc: Tensor, types: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers makes them for Gemma 3."""
    image = types == 1
    starts = image & ~F.pad(image, (1, 0), value=0)[:, :-1]
    groups = torch.where(image, starts.int().cumsum(1) - 1, -1)
    own = (of_query(groups) == of_key(groups)) & (of_query(groups) >= 0)
    mask = (causal(doc) & (of_query(doc) == of_key(doc))) | own
    return mask, mask


def prefixes(doc: Tensor, types: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    mask = (of_query(doc) == of_key(doc)) & (causal(doc) | (of_key(types) == 0))
    return mask, torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))


def completions(_: Tensor, prompt: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    mask = (of_query(prompt) == of_key(prompt)) & ((of_key(own) == 0) | (of_query(own) == of_key(own))) & causal(own)
    return mask, torch.where(mask, 0.0, -1e9)


def ranges(_: Tensor, tout: Tensor, tin: Tensor) -> tuple[Tensor, Tensor]:
    mask = (of_key(tin) <= of_query(tin)) & (of_query(tin) < of_key(tout)) & causal(tin)
    return mask, mask


def places(_: Tensor, end: Tensor, __: Tensor) -> tuple[Tensor, Tensor]:
    i = torch.arange(end.shape[1])
    mask = (of_query(i[None]) < of_key(end)) & causal(end)
    return mask, mask


def chains(_: Tensor, node: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """Two levels up; all there are, and one more."""
    mask, above = of_query(node) == of_key(node), node
    masks: list[Tensor] = []
    for _level in range(3):
        above = parents[above]
        mask = mask | (of_query(above) == of_key(node))
        masks.append(mask & causal(node))
    return masks[0], masks[2]


def begun(_: Tensor, positions: Tensor, __: Tensor) -> tuple[Tensor, Tensor]:
    """Masks of rows that begin inside of a document."""
    numbers, chunks = (positions == 0).cumsum(1), positions // 4
    mask = (of_query(numbers) == of_key(numbers)) & causal(numbers)
    return mask, mask & (of_query(chunks) == of_key(chunks))


@dataclass(frozen=True)
class Case:
    """Args: masks: of two layers, from doc_ids, first and second. annotation: what a Sharding says of them."""

    masks: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    packing: Any
    spans: cp.Spans | None = None


CASES = {
    "spans": Case(spans, cp.DocumentIds("doc_ids"), cp.Spans("first")),
    "images": Case(images, cp.DocumentIds("doc_ids"), cp.Spans("first", value=1)),
    "prefixes": Case(prefixes, cp.DocumentIds("doc_ids"), cp.Spans("first", value=0, prefix=True)),
    "completions": Case(completions, cp.Tree("first", completion="second")),
    "ranges": Case(ranges, cp.Tree("first", tin="second")),
    "places": Case(places, cp.Tree("first")),
    "parents": Case(chains, cp.Tree("first", parents="parents")),
    "begun": Case(begun, cp.PositionIds("first")),
}


class Model(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Two layers with a mask each, and GRPO's loss: clipped ratios of probabilities, weighed by advantages."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masks = CASES[name].masks
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        doc_ids: Tensor,
        first: Tensor,
        second: Tensor,
        labels: Tensor,
        old_logp: Tensor,
        advantages: Tensor,
        num_items: Tensor,
        parents: Tensor | None = None,
    ) -> Tensor:
        h = self.embed(input_ids)
        angles = position_ids[:, None, :, None] * 0.3
        for layer, mask in zip(
            self.qkv, self.masks(doc_ids, first, second if parents is None else parents), strict=True
        ):
            q, k, v = layer(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            q, k = q * angles.cos(), k * angles.sin()
            h = h + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        logp = -F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
        ratio = (logp - old_logp.flatten()).exp()
        gain = torch.minimum(ratio * advantages.flatten(), ratio.clamp(0.8, 1.2) * advantages.flatten())
        return -(gain * (labels.flatten() != -100)).sum() / num_items


Tokens = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Documents, what the mask reads first and second, positions: of 61 tokens."""


def with_spans(name: str) -> Tokens:
    lengths = [21, 9, 31]
    doc = np.repeat([4, 1, 7], lengths)
    first = np.zeros(61, dtype=np.int64)
    marks = [(0, 5), (21, 24), (30, 43)] if name == "prefixes" else [(2, 8), (12, 20), (22, 30), (31, 33), (40, 47)]
    for number, (a, b) in enumerate(marks):
        first[a:b] = number + 1 if name == "spans" else 1
    first = 1 - first if name == "prefixes" else first
    return doc, first, first, np.concatenate([np.arange(n) for n in lengths])


def begun_before() -> Tokens:
    lengths = [22, 9, 30]
    positions = np.concatenate([np.arange(n) for n in lengths])
    positions[:22] += 6
    return np.repeat([4, 1, 7], lengths), positions, positions, positions


def with_trees(name: str) -> Tokens:
    """Two prompts, with three and two completions; the second tree has a completion behind a completion by ranges."""
    sizes, depths = [15, 9, 7, 11, 8, 6, 5], [0, 1, 1, 1, 0, 1, 1 if name == "completions" else 2]
    doc = np.repeat([0] * 4 + [1] * 3, sizes)
    ends = np.cumsum(sizes)
    begins = ends - sizes
    parents = [-1, 0, 0, 0, -1, 4, 4 if name == "completions" else 5]
    start: list[int] = []
    for parent in parents:
        start.append(0 if parent < 0 else start[parent] + sizes[parent])
    positions = np.concatenate([np.arange(n) + at for n, at in zip(sizes, start, strict=True)])
    behind = [next((j for j in range(i + 1, 7) if depths[j] <= depths[i]), 7) for i in range(7)]
    number = np.repeat(np.arange(7), sizes)
    first = {
        "completions": doc * 3 + 2,
        "ranges": np.array(behind)[number],
        "places": np.append(begins, 61)[np.array(behind)][number],
        "parents": 3 * number % 7 + 1,
    }[name]
    return doc, first, np.repeat([0, 1, 2, 3, 0, 5, 4], sizes) if name == "completions" else number, positions


def make_batch(name: str, seed: int = 0) -> dict[str, Tensor]:
    """A row of 67 tokens, which no number of ranks divides; the last ones are padding."""
    rng = np.random.default_rng(seed)
    spans = CASES[name].spans is not None
    doc, first, second, positions = (
        with_spans(name) if spans else begun_before() if name == "begun" else with_trees(name)
    )
    # What padding holds; positions know none.
    odd = 0 if name == "begun" else 5 if spans else -1
    made = {"doc_ids": np.append(doc, [-1] * 6), "first": np.append(first, [odd] * 6),
            "second": np.append(second, [-1] * 6), "position_ids": np.append(positions, [0] * 6)}  # fmt: skip
    batch = {key: torch.from_numpy(value.astype(np.int64))[None] for key, value in made.items()}
    ids = torch.from_numpy(rng.integers(0, VOCAB, (1, 67)))
    labels = ids.roll(-1, 1).masked_fill(batch["doc_ids"] < 0, -100)
    advantages = torch.from_numpy(rng.standard_normal((1, 67))).float()
    # Near those of a fresh model, so that some ratios are clipped and others not.
    old = torch.from_numpy(rng.normal(-np.log(VOCAB), 0.3, (1, 67))).float()
    targets = {"labels": labels, "old_logp": old, "advantages": advantages, "num_items": torch.tensor(60.0)}
    if name == "parents":  # of nodes 0, 3, 6, 2, 5, 1 and 4 of numbers 1 to 7; no token has number 0
        targets["parents"] = torch.tensor([9, 1, 6, 1, 1, 2, 6, 1])
    return {**batch, "input_ids": ids, **targets}


def sharding_of(name: str, mesh: DeviceMesh | int, layout: Any, exchange: Any) -> cp.Sharding:
    case = CASES[name]
    return cp.Sharding(mesh, TOKENS, case.packing, layout, exchange, spans=case.spans, inner="eager")


def step(mesh: DeviceMesh, name: str, layout: str, exchange: str) -> tuple[float, dict[str, Tensor]]:
    if exchange.startswith("a2a+"):
        mesh = grid_mesh(2, mesh.size() // 2)
    sharding = replace(sharding_of(name, mesh, layout, exchange), verify="first_step")
    torch._dynamo.reset()
    model = Model(name)
    compiled = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    with sharding.shard(make_batch(name)) as local:
        loss = compiled(**local)
    return step_of_ranks(model, loss, sharding)


def check(pool: Pool, ranks: int, name: str, layout: str, exchange: str) -> None:
    model = Model(name)
    loss = model(**make_batch(name))
    loss.backward()
    total, grads = pool.run(ranks, step, name, layout, exchange)[0]
    assert abs(total - loss.item()) <= LIMIT * abs(loss.item())
    for key, p in model.named_parameters():
        assert p.grad is not None
        assert float((grads[key] - p.grad).norm() / p.grad.norm()) <= LIMIT, key


@pytest.mark.parametrize(
    ("name", "layout", "exchange"), [("completions", "balanced", "needed"), ("begun", "balanced", "needed")]
)
def test_shared_prompts_and_cut_documents_match_one_process(pool: Pool, name: str, layout: str, exchange: str) -> None:
    check(pool, 2, name, layout, exchange)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [4, 3, 2])
def test_every_mask_matches_one_process(pool: Pool, ranks: int, name: str) -> None:
    """All pairs of an exchange and a layout, in turns by ranks."""
    pairs = list(itertools.product(EXCHANGES, LAYOUTS))[ranks - 2 :: 3]
    pairs += [("a2a+needed", "balanced"), ("a2a+p2p", "dual_chunk")] if ranks == 4 else []
    for exchange, layout in pairs:
        check(pool, ranks, name, layout, exchange)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_masks_are_read_as_what_they_are(name: str) -> None:
    report = cp.explain(Model(name), sharding_of(name, 2, "balanced", "auto"))(**make_batch(name))
    assert report.ok, report
    if name == "begun":
        assert {site.mask for site in report.sites} == {str(cp.PackedMask()), str(cp.PackedMask(chunk=4))}
        return
    if name == "parents":
        assert {site.mask for site in report.sites} == {str(cp.PackedMask(tree=True, levels=n)) for n in (1, 3)}
        return
    expected = cp.PackedMask(spans=True) if CASES[name].spans is not None else cp.PackedMask(tree=True)
    masks = {site.mask for site in report.sites}
    assert masks == {str(expected)} | ({str(cp.PackedMask(window=(8, 0), spans=True))} if name == "spans" else set())
