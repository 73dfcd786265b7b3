"""How many images there are, and how many rows: what models do with these numbers, and with the tensors of images."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported, UserError
from torch.distributed.device_mesh import DeviceMesh
from transformers.modeling_outputs import BaseModelOutputWithPooling

import cp_rewrite as cp
from tests.helpers.one_process import check_all, gradients_of, step_of_ranks
from tests.helpers.pool import Pool

WIDTH, VOCAB, IMAGE = 8, 11, 10
TOKENS = {"input_ids": 1, "doc_ids": 1, "labels": 1}
Read = Callable[[Any, Tensor, Tensor], Any]


class Pictures(nn.Module):
    """Tokens of images, one for each patch, among those of text. read: (the tensors of images as its encoder gives
    them, all of them joined, losses of tokens (B, T)) -> the loss."""

    def __init__(self, read: Read, kind: type = tuple, per_image: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.patch = nn.Embedding(VOCAB, WIDTH), nn.Linear(5, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB)
        self.read, self.kind, self.per_image = read, kind, per_image

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Any:
        patches = [t * h * w for t, h, w in image_grid_thw.tolist()]
        each = [x.tanh() / x.shape[0] for x in self.patch(pixel_values).split(patches)]
        each = [part for x in each for part in x.chunk(self.per_image)]
        return BaseModelOutputWithPooling(pooler_output=self.kind(each))

    def forward(
        self, input_ids: Tensor, doc_ids: Tensor, labels: Tensor, pixel_values: Tensor, image_grid_thw: Tensor
    ) -> Tensor:
        each = self.get_image_features(pixel_values, image_grid_thw).pooler_output
        joined = torch.cat(each, dim=0)
        h = self.embed(input_ids).masked_scatter((input_ids == IMAGE)[..., None], joined)
        q, k, v = self.qkv(h).chunk(3, -1)
        mask = (doc_ids[:, None, :, None] == doc_ids[:, None, None, :]).tril()
        h = h + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=mask)[:, 0]
        losses = F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        return self.read(each, joined, losses)


_module: Any = types.ModuleType("transformers_modules.pictures")
_module.Pictures = Pictures
sys.modules[_module.__name__] = _module
"""Where models are looked for that have such encoders."""


def batch_of(*images: tuple[int, int], text: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """One row: text behind each image of so many patches."""
    generator = torch.Generator().manual_seed(seed + len(images))
    runs = [run for high, wide in images for run in ([IMAGE] * (high * wide), [*range(text)])]
    ids = torch.tensor([sum(runs, [3, 1, 4])])
    patches = sum(high * wide for high, wide in images)
    return {
        "input_ids": ids,
        "doc_ids": (torch.arange(ids.shape[1]) > ids.shape[1] // 2).long()[None],
        "labels": ids.roll(-1, 1).masked_fill(ids == IMAGE, -100),
        "pixel_values": torch.randn(patches, 5, generator=generator).double(),
        "image_grid_thw": torch.tensor([(1, *image) for image in images]),
    }


BATCHES = [
    batch_of((2, 3), (1, 2), (2, 2)),
    batch_of((1, 4), (3, 3)),
    batch_of((1, 1), (1, 2), (2, 1), (3, 1), (2, 2), text=3),
]
"""Three images, two, and five."""

READS: dict[str, Read] = {
    "divided": lambda each, x, losses: losses.sum() / len(each),
    "mean": lambda each, x, losses: losses.mean() * len(each),
    "added": lambda each, x, losses: losses.mean() + len(each) * x.square().mean() / 9,
    "compared": lambda each, x, losses: losses.sum() * (2 if len(each) > 2 else 3),
    "equal": lambda each, x, losses: losses.mean() if len(each) == 3 else losses.sum(),
    "as a tensor": lambda each, x, losses: losses.sum() * torch.full((), len(each), dtype=losses.dtype).log1p(),
    "counted": lambda each, x, losses: sum((losses.mean() / (i + 1) for i in range(len(each))), start=0),
    "tuple or not": lambda each, x, losses: losses.sum() / (len(each) if isinstance(each, tuple) else 1),
    "rows": lambda each, x, losses: losses.sum() / x.shape[0],
    "length of rows": lambda each, x, losses: losses.sum() / len(x) + len(x) * losses.mean(),
    "numbers": lambda each, x, losses: losses.mean() * x.numel() / x.size(0),
    "rows of images": lambda each, x, losses: losses.mean() * x.shape[0] / len(each),
    "mean of rows": lambda each, x, losses: losses.mean() + x.mean() + x.sum() / x.shape[0],
    "joined again": lambda each, x, losses: losses.mean() + torch.cat([torch.cat(each), x]).square().mean(),
}


def mostly_slow(names: Iterable[str], *fast: str) -> list[Any]:
    """These names as parameters; all but some are slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", mostly_slow(READS, "divided", "compared"))
def test_numbers_of_images_are_those_of_the_row(name: str) -> None:
    torch._dynamo.reset()
    sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), inner="eager")
    for report in check_all(Pictures(READS[name]).double(), sharding, BATCHES):
        assert report.largest <= 1e-9, report


def test_a_list_of_images() -> None:
    torch._dynamo.reset()
    sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), inner="eager")
    read: Read = lambda each, x, losses: losses.sum() / (len(each) if isinstance(each, list) else 1)  # noqa: E731
    for report in check_all(Pictures(read, list).double(), sharding, BATCHES):
        assert report.largest <= 1e-9


def first(each: Any) -> Tensor:
    one, *_ = each
    return one


REFUSED: dict[str, Read] = {
    "one by one": lambda each, x, losses: losses.sum() + sum(x.sum() * i for i, x in enumerate(each)),
    "largest": lambda each, x, losses: losses.sum() / max(x.shape[0] for x in each),
    "first": lambda each, x, losses: losses.sum() + each[0].sum(),
    "unpacked": lambda each, x, losses: losses.sum() + first(each).sum(),
    "some": lambda each, x, losses: losses.sum() + torch.cat(each[:1]).sum(),
    "from behind": lambda each, x, losses: losses.sum() + torch.cat([*reversed(each)])[0].sum(),
    "twice": lambda each, x, losses: losses.sum() + torch.cat(each * 2).sum(),
    "with more": lambda each, x, losses: losses.sum() + torch.cat((*each, x)).sum(),
    "zipped": lambda each, x, losses: losses.sum() + sum(x.sum() * y for x, y in zip(each, (1, 2, 3), strict=True)),
    "rows that are compared": lambda each, x, losses: losses.sum() * (2 if x.shape[0] > 12 else 3),
    "rows that are split": lambda each, x, losses: losses.sum() + x.split(2)[0].sum(),
    "rows one by one": lambda each, x, losses: losses.sum() + sum(row.sum() * i for i, row in enumerate(x)),
    "given back": lambda each, x, losses: (losses.sum(), each),
}


@pytest.mark.parametrize("name", mostly_slow(REFUSED, "one by one", "largest", "first"))
def test_what_else_is_read_of_images_is_refused(name: str) -> None:
    torch._dynamo.reset()
    sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), inner="eager")
    with pytest.raises((cp.RewriteRefused, Unsupported, UserError)) as raised:
        cp.check(Pictures(REFUSED[name]).double(), sharding, BATCHES[0])
    assert "test_encoder_counts.py" in str(raised.value)


def test_tensors_that_are_no_images_are_not_counted() -> None:
    """Two for each image: how many there are is not known; how many rows is."""
    torch._dynamo.reset()
    sharding = cp.Sharding(2, TOKENS, cp.DocumentIds("doc_ids"), inner="eager")
    assert cp.check(Pictures(READS["rows"], per_image=2).double(), sharding, BATCHES[0]).largest <= 1e-9
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match="an encoder gives a tensor for each image"):
        cp.check(Pictures(READS["divided"], per_image=2).double(), sharding, BATCHES[0])


def on_ranks(mesh: DeviceMesh, name: str) -> list[tuple[float, dict[str, Any]]]:
    torch._dynamo.reset()
    sharding = cp.Sharding(mesh, TOKENS, cp.DocumentIds("doc_ids"), inner="aot_eager")
    model = Pictures(READS[name]).double()
    compiled, found = torch.compile(model, backend=cp.backend(sharding), fullgraph=True), []
    for batch in BATCHES:
        with sharding.shard(batch) as local:
            loss = compiled(**local)
        whole = sharding.whole(loss).item()
        _, grads = step_of_ranks(model, loss, sharding)
        found.append((whole, {key: grad.numpy() for key, grad in grads.items()}))
        model.zero_grad()
    return found


@pytest.mark.parametrize("name", mostly_slow(["divided", "added", "compared"], "divided"))
def test_numbers_of_images_on_ranks(pool: Pool, name: str) -> None:
    expected: list[tuple[float, dict[str, Tensor]]] = []
    for batch in BATCHES:
        model = Pictures(READS[name]).double()
        loss = model(**batch)
        loss.backward()
        expected.append((loss.item(), gradients_of(model)))
    for found in pool.run(2, on_ranks, name):
        for (loss, grads), (theirs, their_grads) in zip(expected, found, strict=True):
            assert theirs == pytest.approx(loss, rel=1e-9)
            assert grads.keys() == their_grads.keys()
            for key, grad in grads.items():
                torch.testing.assert_close(torch.from_numpy(their_grads[key]), grad, rtol=1e-7, atol=1e-9, msg=key)
