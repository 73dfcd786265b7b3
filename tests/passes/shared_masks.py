"""Masks of spans and trees to draw from, right and wrong, and the batches that they are compared on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import cp_rewrite as cp

Batch = dict[str, Tensor]
Atom = Callable[[Batch], Tensor]  # -> bool, broadcasts to (B, 1, T, T)
TOKENS = 13
ARGS: tuple[str, ...] = (
    "input_ids",
    "doc_ids",
    "position_ids",
    "span_ids",
    "types",
    "flags",
    "prompt",
    "completion",
    "tin",
    "tout",
    "end",
)


@dataclass(frozen=True)
class Kind:
    """An annotation, and what is written under it. whole: masks that may be right on their own. right, wrong: parts."""

    name: str
    sharding: cp.Sharding
    whole: dict[str, Atom]
    right: dict[str, Atom]
    wrong: dict[str, Atom]


def pair(x: Tensor, op: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    return op(x[:, None, :, None], x[:, None, None, :])


def of_query(x: Tensor) -> Tensor:
    return x[:, None, :, None]


def of_key(x: Tensor) -> Tensor:
    return x[:, None, None, :]


def index(b: Batch) -> Tensor:
    return torch.arange(b["input_ids"].shape[1])


def causal(b: Batch) -> Tensor:
    i = index(b)
    return (i[:, None] >= i[None, :])[None, None]


def same(name: str) -> Atom:
    return lambda b: pair(b[name], torch.eq)


def groups(b: Batch) -> Tensor:
    """As transformers numbers the images of Gemma 3."""
    image = b["types"] == 1
    before = F.pad(image, (1, 0), value=0)[:, :-1]
    numbers = torch.cumsum((image & ~before).int(), dim=1) - 1
    return torch.where(image, numbers, -1)


def same_group(b: Batch) -> Tensor:
    g = groups(b)
    return pair(g, torch.eq) & (of_query(g) >= 0)


def in_span(name: str, above: int) -> Atom:
    return lambda b: pair(b[name], torch.eq) & (of_key(b[name]) > above)


def both(name: str, value: int) -> Atom:
    return lambda b: (of_query(b[name]) == value) & (of_key(b[name]) == value)


def near(width: int) -> Atom:
    return lambda b: (index(b)[:, None] - index(b)[None, :] < width)[None, None]


def within(b: Batch) -> Tensor:
    return (of_key(b["tin"]) <= of_query(b["tin"])) & (of_query(b["tin"]) < of_key(b["tout"]))


def nested(b: Batch) -> Tensor:
    return (of_key(b["tin"]) <= of_query(b["tin"])) & (of_query(b["tout"]) <= of_key(b["tout"]))


def up_to_end(b: Batch) -> Tensor:
    return index(b)[None, None, :, None] < of_key(b["end"])


def completion_or_prompt(b: Batch) -> Tensor:
    c = b["completion"]
    return (of_key(c) == 0) | pair(c, torch.eq)


def kinds() -> list[Kind]:
    tokens: dict[str, int] = dict.fromkeys(ARGS, 1)
    docs = cp.DocumentIds("doc_ids")
    doc: dict[str, Atom] = {"doc": same("doc_ids")}
    order: dict[str, Atom] = {"causal": causal, "near(4)": near(4), "near(9)": near(9), "ahead": lambda b: ~causal(b)}

    def of(*names: str) -> dict[str, Atom]:
        return {name: ATOMS[name] for name in names}

    spans = cp.Sharding(2, tokens, docs, spans=cp.Spans("span_ids"))
    minus = cp.Sharding(2, tokens, docs, spans=cp.Spans("types", none=-1))
    images = cp.Sharding(2, tokens, docs, spans=cp.Spans("types", value=1))
    flags = cp.Sharding(2, tokens, docs, spans=cp.Spans("flags", value=1))
    prefix = cp.Sharding(2, tokens, docs, spans=cp.Spans("types", value=0, prefix=True))
    prompts = cp.Sharding(2, tokens, cp.Tree("prompt", completion="completion"))
    ranges = cp.Sharding(2, tokens, cp.Tree("tout", tin="tin"))
    places = cp.Sharding(2, tokens, cp.Tree("end"))
    mixed = ("ids > 0", "ids >= 0", "group", "types 1", "types 0", "key 0", "key 1", "flags", "key ids")
    some = of(*mixed)
    tree = of(
        "prompts", "prompt or own", "own", "key 0 of completions", "query 0", "within", "nested", "end", "tin order"
    )
    return [
        Kind("span ids", spans, {"m": lambda b: same("doc_ids")(b) & (causal(b) | ATOMS["ids > 0"](b))},
             doc | order | of("ids > 0"), some),
        Kind("span ids from 0", minus, {"m": lambda b: same("doc_ids")(b) & (causal(b) | ATOMS["types >= 0"](b))},
             doc | order | of("types >= 0"), some),
        Kind("images", images, {"m": lambda b: same("doc_ids")(b) & (causal(b) | same_group(b)),
                                "late": lambda b: (same("doc_ids")(b) & causal(b)) | same_group(b)},
             doc | order | of("group"), some),
        Kind("flags", flags, {"m": lambda b: same("doc_ids")(b) & (causal(b) | flag_groups(b))},
             doc | order | {"flag group": flag_groups}, some),
        Kind("prefixes", prefix, {"m": lambda b: same("doc_ids")(b) & (causal(b) | (of_key(b["types"]) == 0)),
                                  "row": lambda b: causal(b) | both("types", 0)(b)},
             doc | order | of("types 0", "key 0"), some),
        Kind("prompts", prompts, {"m": lambda b: same("prompt")(b) & completion_or_prompt(b) & causal(b)},
             order | of("prompts", "prompt or own", "own", "key 0 of completions", "query 0"), tree | doc),
        Kind("ranges", ranges, {"m": lambda b: within(b) & causal(b), "n": lambda b: nested(b) & causal(b)},
             order | of("within", "nested", "tin order"), tree | doc),
        Kind("places", places, {"m": lambda b: up_to_end(b) & causal(b)}, order | of("end"), tree | doc),
    ]  # fmt: skip


def flag_groups(b: Batch) -> Tensor:
    flag = b["flags"]
    starts = flag & ~F.pad(flag, (1, 0))[:, :-1]
    numbers = starts.long().cumsum(1) * flag
    return pair(numbers, torch.eq) & of_query(flag) & of_key(flag)


ATOMS: dict[str, Atom] = {
    "ids > 0": in_span("span_ids", 0),
    "ids >= 0": in_span("span_ids", -1),
    "types >= 0": in_span("types", -1),
    "group": same_group,
    "types 1": both("types", 1),
    "types 0": both("types", 0),
    "key 0": lambda b: of_key(b["types"]) == 0,
    "key 1": lambda b: of_key(b["types"]) == 1,
    "flags": lambda b: of_query(b["flags"]) & of_key(b["flags"]),
    "key ids": lambda b: of_key(b["span_ids"]) > 0,
    "prompts": same("prompt"),
    "prompt or own": completion_or_prompt,
    "own": same("completion"),
    "key 0 of completions": lambda b: of_key(b["completion"]) < 1,
    "query 0": lambda b: of_query(b["completion"]) == 0,
    "within": within,
    "nested": nested,
    "end": up_to_end,
    "tin order": lambda b: of_key(b["tin"]) <= of_query(b["tin"]),
}


def draw_batch(rng: np.random.Generator, rows: int = 2) -> Batch:
    """Rows of documents with spans, types and trees of every shape; some that no host accepts among them."""
    made = [_row(rng) for _ in range(rows)]
    batch = {name: torch.from_numpy(np.stack([row[name] for row in made])) for name in made[0]}
    return {name: x.bool() if name == "flags" else x.long() for name, x in batch.items()}


def _row(rng: np.random.Generator) -> dict[str, Any]:
    pad = int(rng.integers(0, 4)) if rng.random() < 0.4 else 0
    real = TOKENS - pad
    lengths = _cut(rng, real, int(rng.integers(1, 4)))
    doc = np.repeat(rng.permutation(9)[: len(lengths)], lengths)
    position = np.concatenate([np.arange(n) for n in lengths])
    spans, types, flags = [], [], []
    number = 0
    for n in lengths:
        inner = _cut(rng, n, int(rng.integers(1, 4)))
        number = 0 if rng.random() < 0.3 else number
        for k, part in enumerate(inner):
            number += 1
            on = rng.random() < 0.6
            spans += [number if on else -int(rng.integers(0, 2))] * part
            flags += [on] * part
            prefix = rng.random() < 0.7
            kind = (0 if k == 0 and rng.random() < 0.8 else 1) if prefix else int(rng.integers(-1, 3))
            types += [kind] * part
    prompt, completion, tin, tout, end = _trees(rng, lengths)
    tail = {"doc_ids": -1, "position_ids": 0, "prompt": -1, "tin": -1, "tout": -1, "end": -1}
    columns = {"input_ids": rng.integers(0, 9, real), "doc_ids": doc, "position_ids": position, "span_ids": spans,
               "types": types, "flags": flags, "prompt": prompt, "completion": completion, "tin": tin, "tout": tout,
               "end": end}  # fmt: skip
    odd = int(rng.integers(-1, 3))  # what padding holds where it may hold anything
    return {name: np.array([*values, *[tail.get(name, odd)] * pad], dtype=np.int64) for name, values in columns.items()}


def _cut(rng: np.random.Generator, total: int, most: int) -> list[int]:
    cuts = np.sort(rng.choice(np.arange(1, total), size=min(most - 1, total - 1), replace=False)) if total > 1 else []
    return np.diff([0, *cuts, total]).astype(int).tolist()


def _trees(rng: np.random.Generator, lengths: list[int]) -> tuple[list[int], ...]:
    """Of each document a prompt with completions, and a tree of any shape, in depth-first order."""
    prompt: list[int] = []
    completion: list[int] = []
    tin: list[int] = []
    ends: list[int] = []
    number = 0
    for which, n in zip(rng.permutation(9), lengths, strict=False):
        parts = _cut(rng, n, int(rng.integers(1, 5)))
        prompt += [int(which)] * n
        names = rng.permutation(5) + 1
        bare = rng.random() < 0.15
        for k, part in enumerate(parts):
            completion += [int(names[k]) if k or bare else 0] * part
        depth: list[int] = []
        for k in range(len(parts)):
            depth.append(0 if k == 0 else int(rng.integers(1, depth[-1] + 2)))
        behind = [
            next((m for m in range(k + 1, len(parts)) if depth[m] <= depth[k]), len(parts)) for k in range(len(parts))
        ]
        for k, part in enumerate(parts):
            tin += [number + k] * part
            ends += [number + behind[k]] * part
        number += len(parts)
    first = [tin.index(n) if n in tin else len(tin) for n in range(number + 1)]
    return prompt, completion, tin, ends, [first[e] for e in ends]
