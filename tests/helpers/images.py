"""Small Qwen VL models, and rows of text and images for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import cp_rewrite as cp
from cp_rewrite.diagnose.check import difference, floor_of

KINDS = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")
TOKENS = {"input_ids": 1, "position_ids": 2, "labels": 1}
VOCAB, START, IMAGE, VIDEO = 64, 57, 58, 59
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
Document = Sequence[int | tuple[int, int]]
"""Parts of a document: n tokens of text, or an image of (high, wide) patches, four of which are a token."""
PATCHES: dict[str, Any] = {
    "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3, "num_heads": 2,
    "initializer_range": 0.2,
}  # fmt: skip
_VISION: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"depth": 2, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    "Qwen2_5_VL": {"depth": 2, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "window_size": 16,
                   "fullatt_block_indexes": [1]},
    "Qwen3VL": {"depth": 3, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24,
                "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
}  # fmt: skip


def build(kind: str) -> Any:
    """The same weights on every call."""
    import transformers

    torch.manual_seed(0)
    text: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rope_parameters": ROPE,
        "use_cache": False, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config={**PATCHES, **_VISION[kind]}, **IDS)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def packed(model: Any, *documents: Document, seed: int = 0) -> dict[str, Tensor]:
    """One row of documents. The first plane of positions counts tokens; three follow, of time, height and width."""
    rows = [row(document, seed + i) for i, document in enumerate(documents)]
    planes = [positions_of(model, ids, document) for ids, document in zip(rows, documents, strict=True)]
    ids = torch.cat(rows, 1)
    return {"input_ids": ids, "position_ids": torch.cat(planes, 2), "labels": labels_of(ids)} | images(documents, seed)


def with_video(model: Any) -> dict[str, Tensor]:
    """One document of 29 tokens, with an image of four, and a video of two frames of three; one of 30 for Qwen3-VL,
    which has a token of text between frames."""
    generator = torch.Generator().manual_seed(0)
    text = [torch.randint(3, 50, (n,), generator=generator) for n in (4, 5, 10)]
    frame, marked = torch.full((3,), VIDEO), type(model).__name__.startswith("Qwen3")
    frames = [frame, *[torch.tensor([7])] * marked, frame]
    ids = torch.cat([text[0], torch.full((4,), IMAGE), text[1], *frames, text[2]])[None]
    sizes = {"image_grid_thw": torch.tensor([[1, 4, 4]]), "video_grid_thw": torch.tensor([[2, 2, 6]])}
    pixels = {
        "pixel_values": torch.randn(16, 96, generator=generator),
        "pixel_values_videos": torch.randn(24, 96, generator=generator),
    }
    places, kinds = torch.arange(ids.shape[1]).expand(1, 1, -1), kinds_of(ids)
    planes, _ = model.model.get_rope_index(ids, mm_token_type_ids=kinds, **sizes)
    labels = ids.masked_fill(kinds > 0, -100)
    return {"input_ids": ids, "position_ids": torch.cat([places, planes]), "labels": labels, **sizes, **pixels}


def kinds_of(ids: Tensor) -> Tensor:
    """(B, T) 0 for text, 1 for tokens of images, 2 for those of videos."""
    return (ids == IMAGE).int() + 2 * (ids == VIDEO).int()


def rows(*documents: Document, pad: int = 0, seed: int = 0) -> dict[str, Tensor]:
    """Rows of one document each, as processors of images give them. pad: so many tokens behind the shorter ones, with a
    mask that leaves them out; 0: all are as long."""
    each = [row(document, seed + i) for i, document in enumerate(documents)]
    total = max(ids.shape[1] for ids in each)
    assert pad or {ids.shape[1] for ids in each} == {total}
    ids = torch.cat([torch.nn.functional.pad(x, (0, total + pad - x.shape[1])) for x in each])
    batch = {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int(), "labels": labels_of(ids)}
    if pad:
        shown = torch.arange(total + pad) < torch.tensor([[x.shape[1]] for x in each])
        batch |= {"attention_mask": shown.long(), "labels": batch["labels"].masked_fill(~shown, -100)}
    return batch | images(documents, seed)


def row(document: Document, seed: int) -> Tensor:
    """(1, T) ids."""
    generator = torch.Generator().manual_seed(seed)
    runs = [
        torch.randint(3, 50, (run,), generator=generator) if isinstance(run, int) else
        torch.full((run[0] * run[1] // 4,), IMAGE)
        for run in document
    ]  # fmt: skip
    return torch.cat(runs)[None]


def positions_of(model: Any, ids: Tensor, document: Document) -> Tensor:
    """(4, 1, T)."""
    index = torch.arange(ids.shape[1]).expand(4, 1, -1).clone()
    if sizes := sizes_of([document]):
        kinds = (ids == IMAGE).int()
        index[1:], _ = model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=torch.tensor(sizes))
    return index


def labels_of(ids: Tensor) -> Tensor:
    return ids.masked_fill(ids == IMAGE, -100)


def sizes_of(documents: Sequence[Document]) -> list[tuple[int, int, int]]:
    return [(1, *run) for document in documents for run in document if not isinstance(run, int)]


def images(documents: Sequence[Document], seed: int = 0) -> dict[str, Tensor]:
    """Pixels by patch, and patches of each image; nothing where there is none."""
    sizes, generator = sizes_of(documents), torch.Generator().manual_seed(seed)
    if not sizes:
        return {}
    patches = sum(high * wide for _, high, wide in sizes)
    pixels = torch.randn(patches, 3 * 2 * 4 * 4, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(sizes)}


Step = tuple[float, dict[str, Tensor]]
"""A loss, and the gradients by name."""


def same(expected: Sequence[Step], found: Sequence[Step], limit: float = 1e-5) -> None:
    """Relative; biases of keys have gradients that are rounding alone."""
    for (loss, grads), (their_loss, theirs) in zip(expected, found, strict=True):
        assert abs(their_loss - loss) <= limit * abs(loss)
        assert theirs.keys() == grads.keys()
        floor = floor_of(grads.values())
        for name, grad in grads.items():
            assert difference(theirs[name], grad, floor) <= limit, name


def annotate(mesh: Any, inner: Any = "eager") -> cp.Sharding:
    torch._dynamo.reset()
    return cp.Sharding(mesh, TOKENS, cp.PositionIds("position_ids"), inner=inner)
