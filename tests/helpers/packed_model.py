"""One small packed model whose parts tests replace, and what the passes say about it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn

import cp_rewrite as cp
from cp_rewrite.passes.graph.tokens import TokenAxis
from cp_rewrite.passes.locality.walk import check_locality
from cp_rewrite.passes.match.find_sites import match_sites
from cp_rewrite.passes.values.edits import Locality
from cp_rewrite.passes.values.state import Site

VOCAB, WIDTH, HEADS = 19, 24, 2
TOKENS = {"input_ids": 1, "position_ids": 1, "doc_ids": 1, "labels": 1}
SHARDING = cp.Sharding(4, TOKENS, cp.DocumentIds("doc_ids"))


class PackedModel(nn.Module):  # pyright: ignore[reportUntypedBaseClass]
    """Embedding, one attention block, a head and a loss. It is right under sharding; subclasses change one part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.extra()

    def extra(self) -> None:
        """More parameters."""

    def inputs(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.embed(input_ids)

    def angles(self, h: Tensor, position_ids: Tensor) -> Tensor:
        return position_ids[..., None].float()

    def mask(self, h: Tensor, doc_ids: Tensor, position_ids: Tensor, input_ids: Tensor) -> Tensor | None:
        index = torch.arange(doc_ids.shape[1], device=doc_ids.device)
        same = doc_ids[:, :, None] == doc_ids[:, None, :]
        return (same & (index[:, None] >= index[None, :]))[:, None]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def attended(self, h: Tensor, mask: Tensor | None, angles: Tensor | None = None) -> Tensor:
        """The attention block, its queries and keys turned by angles."""
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if angles is not None:
            q, k = q * angles.cos(), k * angles.cos()
        return h + self.out(self.attention(q, k, v, mask).transpose(1, 2).flatten(2))

    def mix(self, h: Tensor) -> Tensor:
        return h

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor) -> Any:
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return total / num_items

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, doc_ids: Tensor, labels: Tensor, num_items: Tensor
    ) -> Any:
        h = self.inputs(input_ids, position_ids)
        mask = self.mask(h, doc_ids, position_ids, input_ids)
        h = self.attended(h, mask, self.angles(h, position_ids)[:, None])
        return self.loss(self.head(self.mix(h)), labels, num_items)


def packed_batch(rows: int = 1, tokens: int = 14) -> dict[str, Tensor]:
    """(B, T) rows of three documents each."""
    generator = torch.Generator().manual_seed(1)
    cuts = [0, 5, 9, tokens]
    doc_ids = torch.repeat_interleave(torch.arange(3), torch.tensor(cuts).diff()).expand(rows, -1).contiguous()
    position_ids = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cuts)]).expand(rows, -1)
    input_ids = torch.randint(0, VOCAB, (rows, tokens), generator=generator)
    labels = torch.randint(0, VOCAB, (rows, tokens), generator=generator)
    labels[:, :4] = -100
    return {
        "input_ids": input_ids,
        "position_ids": position_ids.contiguous(),
        "doc_ids": doc_ids,
        "labels": labels,
        "num_items": (labels != -100).sum().float(),
    }


@dataclass(frozen=True)
class Verdict:
    """Findings of the passes that only read, in a model's graph."""

    sites: Sequence[Site]
    refusals: Sequence[cp.Refusal]
    locality: Locality

    @property
    def reasons(self) -> set[str]:
        return {refusal.reason.name for refusal in self.refusals}

    def __str__(self) -> str:
        return "\n".join(map(str, self.refusals)) or "no refusals"


class _Stop(Exception):
    """The graph is known; nothing need run."""


def capture(
    model: Callable[..., Any],
    batch: Mapping[str, Any],
    look: Callable[[fx.GraphModule], Any],
    dynamic: Mapping[str, int] | None,
) -> Any:
    """Result of `look` for the model's graph. `dynamic`: argument -> its symbolic dim; None: fixed shapes."""
    found: list[Any] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(look(gm))
        return stop

    def stop(*_: Any) -> Any:
        raise _Stop

    torch._dynamo.reset()
    values = {name: v.clone() if isinstance(v, Tensor) else v for name, v in batch.items()}
    for name, dim in (dynamic or {}).items():
        if isinstance(values.get(name), Tensor):
            torch._dynamo.mark_dynamic(values[name], dim)
    with contextlib.suppress(_Stop):
        torch.compile(model, backend=backend, fullgraph=True, dynamic=None if dynamic else False)(**values)
    assert len(found) == 1
    return found[0]


def judge(
    model: Callable[..., Any],
    batch: Mapping[str, Any] | None = None,
    sharding: cp.Sharding = SHARDING,
    *,
    dynamic: bool = True,
    also_dynamic: Sequence[str] = (),
) -> Verdict:
    """Run matching and the locality check on a model's graph; what could be resolved is refused.

    `dynamic`: symbolic token counts, and a symbolic dim 1 of the arguments in `also_dynamic`.
    """

    def look(gm: fx.GraphModule) -> Verdict:
        axis = TokenAxis.read(gm, sharding).unified()
        found = match_sites(gm, sharding, axis)
        unresolved = dataclasses.replace(sharding, resolve=False)
        report = check_locality(gm, unresolved, found.sites, axis, refused=found.refused)
        return Verdict(found.sites, [*dict.fromkeys((*axis.refusals, *found.refusals, *report.refusals))], report)

    marks = {**sharding.tokens, **dict.fromkeys(also_dynamic, 1)}
    return capture(model, batch or packed_batch(), look, marks if dynamic else None)
