"""A dry run on a model of `transformers` that is known by its config alone: no weights are read or made.

Does a step fit into a GPU, and what would make it fit: `python -m cp_rewrite memory`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cp_rewrite.packing import PositionIds
from cp_rewrite.planning.cost.memory import GIB, Memory, options, predict
from cp_rewrite.sharding import Sharding

from .explain import Report, explain
from .target import Target


@dataclass(frozen=True)
class Fit:
    """The predicted peak of one GPU beside what it has. `options`: what else could be done -> the memory that it
    leaves, each beside those before it."""

    target: Target
    memory: Memory
    ranks: int
    options: tuple[tuple[str, Memory], ...]

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.target.room

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. Bytes."""
        one = {**self.memory.parts, "peak": self.memory.peak, "at": self.memory.at}
        others = [{"what": what, "peak": memory.peak} for what, memory in self.options]
        return {"device_bytes": self.target.device_bytes, "fits": self.fits, "memory": one, "options": others}

    def __str__(self) -> str:
        room = self.target.room
        lines = [
            f"{self.target.rows} tokens a GPU, {self.target.world_size} ranks share a row, weights sharded over "
            f"{self.ranks}; fp32 weights and AdamW, activations in bf16",
            *(f"{name:12} {size / GIB:8.1f} GiB" for name, size in self.memory.parts.items()),
            f"{'peak':12} {self.memory.peak / GIB:8.1f} GiB of {room / GIB:.0f}: "
            + ("fits" if self.fits else "does NOT fit"),
        ]
        if not self.fits:
            lines.append("what would make it fit, each beside those before it:")
            for what, memory in self.options:
                verdict = "fits" if memory.peak <= room else "does not fit"
                lines.append(f"  {what}: {memory.peak / GIB:.1f} GiB, {verdict}")
        return "\n".join(lines)


def fit_of(
    target: Target,
    checkpointed: bool = False,
    data_parallel: int = 1,
    *,
    loss_alone: bool = False,
    offload: Collection[str] = (),
) -> Fit:
    """The peak on a target, with every layer checkpointed or as the model has them. `offload`: what lies on the host.
    `loss_alone`: the model will return no logits, though the one that was looked at does.

    Raises:
        ValueError: the target is of a function, which has no weights.
    """
    if target.needs is None:
        raise ValueError("memory is predicted of a module, whose weights are known")
    needs = target.needs.checkpointed() if checkpointed else target.needs
    needs = needs.of_loss() if loss_alone else needs
    share = replace(target.share(data_parallel), on_host=offload)
    room = target.room
    tried: list[tuple[str, Memory]] = []
    for what, memory in options(needs, share):
        tried.append((what, memory))
        if memory.peak <= room:
            break
    return Fit(target, predict(needs, share), share.ranks, tuple(tried))


_CACHE = (
    "explained with use_cache=False, where the config says True: set it in training too, since with a cache "
    "transformers leaves out the mask that keeps documents apart"
)


def explain_config(
    name: str, lengths: Sequence[int], world_size: int, layers: int | None = None, nodes: int = 1, **options: Any
) -> Report:
    """What `explain` says of a causal language model in training on one packed row.

    Args:
        name: a folder with a config.json, that file, or a name that `transformers` finds.
        lengths: tokens per document of the row.
        layers: layers to look at; None: the first ones up to where each kind of layer has come, at least 2. Times and
            memory are those of all layers.
        nodes: machines that the ranks are spread over.
        options: further arguments of Sharding.

    Raises:
        ImportError: `transformers` is missing. OSError: there is no such config.
        ValueError: `layers` is no whole number from 1 to the config's, or what `Sharding` and `explain` raise.
    """
    try:  # late: only this command needs it
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'cp_rewrite[transformers]'") from error

    if world_size % nodes:
        raise ValueError(f"nodes must divide the {world_size} ranks, got {nodes}")
    if name.startswith(("/", ".", "~")) and not Path(name).exists():  # transformers would take it for a name on the hub
        raise OSError(f"{name} is not there: give a folder with a config.json, or a name that transformers finds")
    config = AutoConfig.from_pretrained(str(Path(name).parent) if name.endswith(".json") else name)
    text = config.get_text_config()
    notes = (_CACHE,) if getattr(text, "use_cache", False) else ()
    config.use_cache = text.use_cache = False
    with torch.device("meta"):
        kinds = _kinds_of(text, AutoModelForCausalLM.from_config(config))
    _keep_layers(text, kinds, layers)
    with no_init_weights():  # weights are memory that nothing writes; buffers, which masks are read off, hold numbers
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    tokens = torch.zeros_like(position_ids)
    batch = {"input_ids": tokens, "position_ids": position_ids, "labels": tokens.clone()}
    options = {"ranks_per_node": world_size // nodes, **options}
    sharding = Sharding(world_size, dict.fromkeys(batch, 1), PositionIds("position_ids"), **options)
    report = explain(model.train(), sharding, shift_labels=True)(**batch)
    kept = kinds[: text.num_hidden_layers]
    like = [i if i < len(kept) else kept.index(kind) if kind in kept else -1 for i, kind in enumerate(kinds)]
    if report.target is not None and min(like) >= 0:
        report = replace(report, target=report.target.of_all_layers(like))
    elif min(like) < 0:
        notes = (*notes, f"times and memory are those of the {len(kept)} layers that were looked at")
    return replace(report, notes=(*report.notes, *notes))


def _kinds_of(config: Any, model: nn.Module) -> list[tuple[str, int]]:
    """Of each layer what the config calls it, and how many parameters it has: experts come behind dense layers."""
    total: int = config.num_hidden_layers
    names = getattr(config, "layer_types", None) or [""] * total
    sizes = [0] * total
    for name, weight in model.named_parameters():
        found = re.search(r"\.(\d+)\.", name)
        if found and int(found[1]) < total:
            sizes[int(found[1])] += weight.numel()
    return list(zip(names, sizes, strict=True))


def _keep_layers(config: Any, kinds: Sequence[tuple[str, int]], layers: int | None) -> None:
    """Shorten the model, and every list in its config that has one entry per layer."""
    total: int = config.num_hidden_layers
    every_kind = min(total, max(2, *(kinds.index(kind) + 1 for kind in set(kinds))))
    kept: int = every_kind if layers is None else layers
    if not 1 <= kept <= total:
        raise ValueError(f"layers must be from 1 to the config's {total}, got {kept}")
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == total:
            setattr(config, name, value[:kept])
    config.num_hidden_layers = kept
