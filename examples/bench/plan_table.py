"""Plans of 8 to 512 ranks, 8,192 tokens each, nodes of 8: balance, rows that travel, time to plan; and a schedule that
gives each document a power of two of ranks, on the same documents.

    python examples/bench/plan_table.py                                # the table, some minutes
    python examples/bench/plan_table.py --json before.json             # in a checkout of another commit
    python examples/bench/plan_table.py --before before.json --write   # both, into docs/generated/plans.md
    python examples/bench/plan_table.py --short --before before.json --write   # its last table: short rows, 8 ranks

The other schedule is the one that Megatron-LM publishes for its dynamic context parallelism: a document of L tokens
goes to 2^⌈log2(L / tokens of a rank)⌉ ranks side by side and costs L² over them. The dearest go first, each to ranks
with least so far. Its ranks have as much work as their tiles; all rows of a document go to all of its other ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from packs import draw

from cp_rewrite.documents import Documents
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.cost.constants import TILE
from cp_rewrite.planning.cost.devices import DEVICES
from cp_rewrite.planning.cost.tiles import imbalance, window_tiles
from cp_rewrite.planning.layouts.by_name import lay_out
from cp_rewrite.planning.layouts.options import LayoutOptions
from cp_rewrite.planning.plan import Plan, plan

LOCAL, NODE = 8192, 8
RANKS = (8, 16, 64, 256, 512)
SHORT, PACKS = (128, 256, 512, 1024, 2048, 4096, 8192), 8
"""Tokens of a rank, and packs of each mix."""
MOST_SECONDS = 120
"""Plans that take longer are not waited for."""
PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "generated" / "plans.md"
Cell = dict[str, Any]


def zipf(tokens: int) -> list[int]:
    """The k-th document has 1/k of the longest one's tokens, a quarter of all, and at least 16."""
    return _filled(tokens, (max(16, tokens // (4 * k)) for k in itertools.count(1)))


def code(tokens: int) -> list[int]:
    """Source files: lognormal, median 800 tokens, one in forty above 12,000."""
    rng = np.random.default_rng(0)
    return _filled(tokens, (min(tokens // 4, max(1, int(rng.lognormal(np.log(800), 1.4)))) for _ in itertools.count()))


def tiny(tokens: int) -> list[int]:
    """1 to 199 tokens each."""
    rng = np.random.default_rng(0)
    return _filled(tokens, (int(rng.integers(1, 200)) for _ in itertools.count()))


def _filled(tokens: int, lengths: Iterator[int]) -> list[int]:
    found: list[int] = []
    while tokens:
        found.append(min(tokens, next(lengths)))
        tokens -= found[-1]
    return found


MIXES: dict[str, Callable[[int], list[int]]] = {
    "web": lambda tokens: [*draw("web_mix", tokens, 42)],
    "prolong": lambda tokens: [*draw("prolong", tokens, 42)],
    "long_tail": lambda tokens: [*draw("long_tail", tokens, 42)],
    "code": code,
    "one document": lambda tokens: [tokens],
    "three quarters": lambda tokens: _filled(tokens, itertools.repeat(LOCAL * 3 // 4)),
    "tiny": tiny,
    "zipf": zipf,
}


def least_received(lengths: list[int], ranks: int, rows: int, tiles: float) -> float:
    """A lower bound of KV rows that `ranks` ranks receive together, with `rows` tokens and up to 1.02 of the mean of
    all `tiles` each.

    A rank that holds tokens S of a document sees all keys before the last of them, max(S). S has up to `rows` tokens,
    and the sum of their positions, its work, is W at most. So max(S) is at least the sum over S of x / rows, of x² / W,
    and of the greater of both at each x. Over all tokens of a document that sum is what its ranks see, of which L are
    their own. The rank with the last token, which has n at most, receives L - n of them alone.
    """
    pairs = 1.02 * tiles / ranks * TILE**2
    n, turn = min(float(rows), math.sqrt(2 * pairs)), pairs / rows
    found = 0.0
    for length in lengths:
        seen = min(length, turn) ** 2 / (2 * rows) + max(0.0, length**3 - turn**3) / (3 * pairs)
        found += max(0.0, length - n, seen - length)
    return found


def measured(lengths: list[int], ranks: int, node: int | None) -> Cell:
    """Figures that a plan reaches; rows are KV rows of a forward, of all ranks together."""
    options = LayoutOptions(1, 1, node, DEVICES["h200"])
    documents, times = Documents.from_lengths(lengths), list[float]()
    while len(times) < 3 and sum(times) < 2:
        start = time.process_time()
        lay_out(documents, ranks, "balanced", PackedMask(), options)
        times.append(time.process_time() - start)
    p = plan(lengths, ranks, ranks_per_node=node)
    work, every = p.load.whole_tiles, float(p.recv_rows.sum())
    cell: Cell = {"imbalance": p.imbalance, "cpu": 1e3 * min(times), "rows": every / p.documents.total}
    cell["seconds"] = p.seconds[p.exchange]
    cell["received"] = _over(every, least_received(lengths, ranks, LOCAL, work), p)
    if node is not None:
        nodes = ranks // node
        bound = least_received(lengths, nodes, LOCAL * node, work)
        cell["exchange"], cell["ms"] = p.exchange, 1e3 * cell["seconds"]
        cell["across"] = _over(_across(p), bound, p)
        if p.exchange.startswith("a2a+"):
            cell["imbalance"] = imbalance(p.places[node].tiles)
    return cell


def _across(p: Plan) -> float:
    """Rows that enter nodes from others by the predicted exchange, each as often as it does, in whole rows."""
    moved = getattr(p, "moved_bytes", {})
    if p.exchange in moved:
        return moved[p.exchange][1] * p.world_size / p.model.kv_bytes
    return float(p.node_rows.sum())


def _over(rows: float, bound: float, p: Plan) -> float | None:
    """None: the bound is less than a hundredth of the tokens."""
    return rows / bound if bound > p.documents.total / 100 else None


def powers_of_two(lengths: list[int], ranks: int) -> Cell:
    """The other schedule, in the same measures."""
    tiles, tokens, rows = np.zeros(ranks), np.zeros(ranks), 0.0
    cost, work = np.zeros(ranks), 0.0
    for length in sorted(lengths, reverse=True):
        share = min(ranks, 2 ** max(0, math.ceil(math.log2(length / LOCAL))))
        first = int(cost.reshape(-1, share).sum(1).argmin()) * share
        mine = slice(first, first + share)
        done = float(window_tiles(*(np.array([x]) for x in (length, length, -1, 0)))[0])
        cost[mine] += length**2 / share**2
        tiles[mine] += done / share
        tokens[mine] += length / share
        rows, work = rows + length * (share - 1), work + done
    bound = least_received(lengths, ranks, LOCAL, work)
    over = rows / bound if bound > sum(lengths) / 100 else None
    return {"imbalance": imbalance(tiles), "tokens": imbalance(tokens), "received": over}


def measure() -> Iterator[tuple[str, Cell]]:
    def too_long(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_long)
    for ranks, mix in itertools.product(RANKS, MIXES):
        lengths = MIXES[mix](LOCAL * ranks)
        cell: Cell = {"documents": len(lengths)}
        for name, node in (("flat", None), ("nodes", NODE)):
            if ranks > NODE or node is None:
                signal.alarm(MOST_SECONDS)
                try:
                    cell[name] = measured(lengths, ranks, node)
                except TimeoutError:
                    cell[name] = None
                signal.alarm(0)
        yield f"{ranks} {mix}", cell


def measure_short() -> Iterator[tuple[str, Cell]]:
    """Rows of few tokens on 8 ranks: of each mix several packs; time to plan, and predicted seconds of attention."""
    for local, mix in itertools.product(SHORT, ("web_mix", "prolong", "long_tail")):
        packs = [[*draw(mix, local * NODE, seed)] for seed in range(PACKS)]
        cells = [measured(lengths, NODE, None) for lengths in packs]
        yield f"{local} {mix}", {key: [cell[key] for cell in cells] for key in ("imbalance", "cpu", "seconds")}


HEAD = """# Plans of 8 to 512 ranks

Written by `examples/bench/plan_table.py --write`. 8,192 tokens a rank, one row, causal, 64/8 heads of 128, H200; on one
node, and on nodes of 8. *Before → now*: before many ranks were halved (452a682), and now.

- *imbalance* is of ranks, and of nodes where heads are exchanged inside of them.
- *received*: KV rows of all ranks over a lower bound of them, on one node. –: hardly any must travel; so many of all
  rows do.
- *across*: rows that enter nodes by the exchange that is predicted to take least, over the bound for nodes.
- *ms*: CPU time to plan, of one core, the best of three, before once and beside much other work. *?*: a plan
  took over two minutes there.
- *powers of two*: the schedule of Megatron-LM's dynamic context parallelism on the same documents: imbalance of tiles,
  imbalance of tokens, and received rows over the bound, which is one of balanced plans: others may stay below.

| ranks | mix | documents | imbalance | on nodes | received | across | ms | on nodes | powers of two |
|---|---|---|---|---|---|---|---|---|---|
"""


def lines(now: dict[str, Cell], before: dict[str, Cell]) -> Iterator[str]:
    for key, cell in now.items():
        ranks, mix = key.split(" ", 1)
        old = before.get(key, {})
        other = powers_of_two(MIXES[mix](LOCAL * int(ranks)), int(ranks))
        beside = f"{other['imbalance']:.2f}, {other['tokens']:.2f}, {_times(other['received'])}"

        def both(part: str, show: Callable[[Cell], str], old: Cell = old, cell: Cell = cell) -> str:
            if part not in cell:
                return ""
            found = [show(x) if x else "?" for x in (*([old[part]] if part in old else []), cell[part])]
            return " → ".join(found)

        columns = (
            ranks, mix, f"{cell['documents']:,}",
            both("flat", lambda x: f"{x['imbalance']:.3f}"), both("nodes", lambda x: f"{x['imbalance']:.3f}"),
            both("flat", lambda x: _times(x["received"], x["rows"])), both("nodes", lambda x: _times(x["across"])),
            both("flat", lambda x: f"{x['cpu']:.0f}"), both("nodes", lambda x: f"{x['cpu']:.0f}"), beside,
        )  # fmt: skip
        yield "| " + " | ".join(columns) + " |"


SHORT_TITLE = "\n## Short rows\n"
SHORT_HEAD = f"""{SHORT_TITLE}
Written by `examples/bench/plan_table.py --short --write`. 8 ranks, 8 packs of each mix; a row of tiles is 128 tokens.
*Before → now*: before the search was as long as what it may save (1353b45), and now. *imbalance*, *ms*: the median.
*attention*: its predicted seconds in a layer now over those before, mean and largest. *layer*: the same of a whole
layer of 8,192 columns, whose products take 24 columns² operations a token and pass, at 500 TFLOP/s.

| tokens a rank | mix | imbalance | ms | attention | layer |
|---|---|---|---|---|---|
"""


def short_lines(now: dict[str, Cell], before: dict[str, Cell]) -> Iterator[str]:
    for key, cell in now.items():
        local, mix = key.split(" ")
        both = [before[key], cell] if key in before else [cell]
        uneven = " → ".join(f"{np.median(x['imbalance']):.3f}" for x in both)
        times = " → ".join(f"{np.median(x['cpu']):.0f}" for x in both)
        products = 3 * 24 * 8192**2 * int(local) / 500e12
        shares = [np.divide(np.add(cell["seconds"], t), np.add(both[0]["seconds"], t)) for t in (0, products)]
        ratios = " | ".join(f"{share.mean():.3f}, {share.max():.3f}" for share in shares)
        yield f"| {local} | {mix} | {uneven} | {times} | {ratios} |"


def _times(value: float | None, rows: float | None = None) -> str:
    return f"{value:.2f} ×" if value is not None else "–" if rows is None else f"– ({rows:.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    parser.add_argument("--before", type=Path, help="such a file, of another commit")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--short", action="store_true", help="only the table of short rows")
    args = parser.parse_args()
    now = dict(measure_short() if args.short else measure())
    before = json.loads(args.before.read_text()) if args.before else {}
    if args.json:
        args.json.write_text(json.dumps(now))
    head, rows = (SHORT_HEAD, short_lines) if args.short else (HEAD, lines)
    text = head + "\n".join(rows(now, before)) + "\n"
    print(text)
    if args.write:
        long, title, short = PAGE.read_text().partition(SHORT_TITLE)
        PAGE.write_text(long + text if args.short else text + title + short)


if __name__ == "__main__":
    main()
