"""Does a step fit into a GPU, and what would make it fit: `python -m cp_rewrite memory`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from cp_rewrite.planning.cost.memory import GIB, Memory, options, predict

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
