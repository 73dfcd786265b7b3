"""The longest rows that a model trains on, predicted: the table and the plot of docs/guides/memory.md.

python examples/bench/longest_rows.py            # prints the table, writes docs/images/memory.png
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from cp_rewrite.diagnose.config import explain_config
from cp_rewrite.planning.cost.constants import BESIDE_TENSORS
from cp_rewrite.planning.cost.devices import DEVICES
from cp_rewrite.planning.cost.memory import GIB, Needs, Share, predict

DOCUMENT = 8192
GPUS = (1, 2, 4, 8)
MACHINES = {"H200": "h200", "H100 80GB": "h100"}
WAYS: dict[str, tuple[str, ...]] = {
    "tile": (),
    "tile, checkpoints on the host": ("checkpoints",),
    "tile, checkpoints and weights on the host": ("checkpoints", "weights"),
}
PAGE = Path(__file__).parent.parent.parent / "docs" / "guides" / "memory.md"


@dataclass(frozen=True)
class Model:
    """Needs of a checkpointed model that returns its loss alone, and the KV rows that a rank of 8 reads for each of its
    own where documents have `DOCUMENT` tokens."""

    name: str
    needs: Needs
    expanded: float

    @classmethod
    def of(cls, name: str, config: PretrainedConfig) -> Model:
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            target = explain_config(folder, [DOCUMENT] * 2 * GPUS[-1], GPUS[-1]).target
        assert target is not None
        assert target.needs is not None
        return cls(name, target.needs.checkpointed().of_loss(), target.share().expanded / target.rows)

    def longest(self, machine: str, gpus: int, on_host: tuple[str, ...]) -> tuple[int, float] | None:
        """The largest power of two of tokens that fits, and the GiB that it takes; None: not even `DOCUMENT` do."""
        found, tokens = None, DOCUMENT
        while True:
            rows = tokens // gpus
            share = Share(rows, round(rows * self.expanded), gpus, on_host=on_host, tile="auto", accumulated=False)
            peak = predict(self.needs, share).peak
            if peak > DEVICES[MACHINES[machine]].device_bytes - BESIDE_TENSORS:
                return found
            found, tokens = (tokens, peak / GIB), 2 * tokens


def models() -> list[Model]:
    """Llama-3-8B and Qwen3-30B-A3B."""
    both = {"num_attention_heads": 32, "head_dim": 128, "use_cache": False, "max_position_embeddings": 1 << 20}
    llama = LlamaConfig(vocab_size=128_256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                        num_key_value_heads=8, architectures=["LlamaForCausalLM"], **both)  # fmt: skip
    qwen = Qwen3MoeConfig(vocab_size=151_936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
                          num_hidden_layers=48, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
                          norm_topk_prob=True, architectures=["Qwen3MoeForCausalLM"], **both)  # fmt: skip
    return [Model.of("Llama-3-8B", llama), Model.of("Qwen3-30B-A3B", qwen)]


def table(model: Model) -> str:
    lines = [f"| {model.name}, GPUs | options | {' | '.join(map(str, GPUS))} |", "|---" * (2 + len(GPUS)) + "|"]
    for machine in MACHINES:
        for way, on_host in WAYS.items():
            found = [model.longest(machine, gpus, on_host) for gpus in GPUS]
            cells = ["–" if one is None else f"{one[0]:,} ({one[1]:.0f})" for one in found]
            lines.append(f"| {machine} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(drawn: Sequence[Model], out: Path) -> None:
    from matplotlib.figure import Figure  # late: the table needs none

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(drawn), sharey=True), drawn, strict=True):
        for machine, line in zip(MACHINES, ("-", "--"), strict=True):
            for (way, on_host), color in zip(WAYS.items(), ("#4c78a8", "#f58518", "#1a7f37"), strict=True):
                found = {gpus: model.longest(machine, gpus, on_host) for gpus in GPUS}
                there = {gpus: one[0] for gpus, one in found.items() if one}
                axes.plot(there.keys(), there.values(), line, color=color, marker="o", label=f"{machine}: {way}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(GPUS, [*map(str, GPUS)])
        axes.set_yticks(
            ticks := [2**n for n in range(15, 25)],
            [f"{tick >> 10}K" if tick < 1 << 20 else f"{tick >> 20}M" for tick in ticks],
        )
        axes.set_xlabel("GPUs")
        axes.set_title(f"{model.name}, predicted", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("tokens of the longest row")
    figure.axes[0].legend(fontsize=6, frameon=False)
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAGE.parent.parent / "images" / "memory.png")
    out, found = parser.parse_args().out, models()
    print("\n\n".join(map(table, found)))
    plot(found, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
