"""Draw the table "Beside other libraries" of RESULTS.md.

python examples/bench/plot_speed.py            # writes docs/images/speed.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).parent
COLORS = ["#1a7f37", "#4c78a8", "#f58518", "#e45756", "#b8b8b8", "#909090", "#686868"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent.parent / "docs" / "images" / "speed.png")
    out = parser.parse_args().out
    header, rows = read_table((HERE / "RESULTS.md").read_text())
    figure = Figure(figsize=(12, 4), layout="constrained")
    axes = figure.add_subplot()
    methods = header[1:]
    width = 0.86 / len(methods)
    for i, method in enumerate(methods):
        heights = [0.0 if row[1 + i] == "–" else float(row[1 + i]) for row in rows]
        places = [pack + (i - (len(methods) - 1) / 2) * width for pack in range(len(rows))]
        bars = axes.bar(places, heights, width * 0.92, label=method, color=COLORS[i])
        axes.bar_label(bars, [f"{height:.0f}" if height else "" for height in heights], fontsize=7)
    axes.set_xticks(range(len(rows)), [row[0].replace(" (", "\n(") for row in rows], fontsize=8)
    axes.set_ylabel("% of ideal, forward and backward")
    axes.set_title("Packed causal attention on 4 H200, 64/8 heads, bf16", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)
    figure.savefig(out, dpi=130)
    print(f"wrote {out}")


def read_table(text: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the first table below "Beside other libraries"."""
    section = text.split("## Beside other libraries", 1)[1].split("\n\n| ", 1)[1].split("\n\n", 1)[0]
    header, _, *rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in section.split("\n")]
    return header, rows


if __name__ == "__main__":
    main()
