"""Forward and backward of each flash library that is installed, under the settings that it lets one choose.

    python examples/bench/kernels.py [--heads 64/8,32/32] [--seconds 110]

One GPU, head dim 128, bf16, the whole of three packs of 32K tokens: TFLOP/s by setting, and the percent that these are
of what the library's own choice reaches. Settings of a pack take turns; medians. A setting whose results differ from
those of the first one is named wrong. "bound" is what causal tiles of 128 x 128 allow at the speed of one document. No
setting is compiled any more after `--seconds`.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from methods import Alone, Setup
from packs import Pack, packs
from torch import Tensor

from cp_rewrite.kernels.flash import fa3, fa4
from cp_rewrite.kernels.select import device_facts

HEAD_START = 4_000_000
"""Cycles that the GPU sleeps before a call: the host is ahead of it."""
PACKS = ("web_mix 8K/GPU (27", "64 x 512", "one 32K")
"""Beginnings of the names of packs of 4 GPUs."""


@dataclass(frozen=True)
class Setting:
    """Args: name. kernel: a library. order: of the documents. forward, backward: what its functions are told."""

    name: str
    kernel: str = "fa4"
    order: Callable[[Sequence[int]], Sequence[int]] = tuple
    forward: Mapping[str, Any] = field(default_factory=dict[str, Any])
    backward: Mapping[str, Any] = field(default_factory=dict[str, Any])


def settings(grouped: bool) -> list[Setting]:
    """The library's own choice comes first. `grouped`: query heads share keys."""
    found = [
        Setting("fa4"),
        Setting("fa4, longest first", order=lambda x: sorted(x, reverse=True)),
        Setting("fa4, shortest first", order=sorted),
    ]
    if "flash_attn_interface" in device_facts(torch.device("cuda")).modules:
        found += [Setting("fa3", "fa3"), Setting("fa3, longest first", "fa3", found[1].order)]
        found += [Setting("fa3, heads not packed", "fa3", forward={"pack_gqa": False})] * grouped
    found += [Setting("fa4, heads not packed", forward={"pack_gqa": False})] * grouped
    found += [Setting(f"fa4, keys {n}", forward={"tile_mn": (128, n)}) for n in (160, 96)]
    found += [
        Setting("fa4, P through memory", forward={"mma_pv_is_rs": False}),
        Setting("fa4, no overlap of warp groups", forward={"intra_wg_overlap": False}),
        Setting("fa4 backward, 80 queries", backward={"m_block_size": 80, "dQ_swapAB": True}),
        Setting("fa4 backward, dO in one stage", backward={"num_stages_dO": 1}),
        Setting("fa4 backward, 96 keys", backward={"n_block_size": 96}),
    ]
    return found


@contextmanager
def told(setting: Setting) -> Generator[None]:
    """The setting's library as our kernels call it."""
    if setting.kernel == "fa3":
        ops = fa3._ops()
        places = [(fa3, "_ops", lambda: SimpleNamespace(fwd=partial(ops.fwd, **setting.forward), bwd=ops.bwd))]
    else:
        library = importlib.import_module("flash_attn.cute.interface")
        forward, tiles = partial(library._flash_attn_fwd, **setting.forward), library._tile_size_bwd_sm90
        functions = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=library._flash_attn_bwd)
        places = [
            (fa4, "_interface", lambda: functions),
            (fa4, "was_read", lambda: False),  # each call by the library
            (library, "_tile_size_bwd_sm90", lambda *a, **k: replace(tiles(*a, **k), **setting.backward)),
        ]
    before = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(places, before, strict=True):
            setattr(owner, name, value)


class Tried:
    """One setting on one pack. Inputs are the same for all settings, and for all orders of equal documents."""

    def __init__(self, setting: Setting, pack: Pack, setup: Setup) -> None:
        self.setting = setting
        torch.manual_seed(0)
        ordered = replace(pack, lengths=tuple(setting.order(pack.lengths)))
        self.alone = Alone(ordered, replace(setup, kernel=setting.kernel))
        self.times: list[tuple[float, float]] = []

    def run(self) -> list[Tensor]:
        """out, dq, dk and dv. Notes the milliseconds of both directions."""
        a, b, c = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        with told(self.setting):
            torch.cuda._sleep(HEAD_START)
            a.record()
            self.alone.forward()
            b.record()
            grads: Any = self.alone.backward()
            c.record()
        torch.cuda.synchronize()
        self.times.append((a.elapsed_time(b), b.elapsed_time(c)))
        return [self.alone.out, *grads]


def prepared(pack: Pack, setup: Setup, until: float) -> tuple[list[Tried], dict[str, str]]:
    """The settings that run and are right; why others don't."""
    found: list[Tried] = []
    why: dict[str, str] = {}
    expected: list[Tensor] = []
    for setting in settings(setup.heads > setup.heads_kv):
        if time.perf_counter() > until and (setting.forward or setting.backward):
            why[setting.name] = "no time left"
            continue
        tried = Tried(setting, pack, setup)
        try:
            results = tried.run()
        except Exception as error:  # whatever a library says of a setting that it can't do
            why[setting.name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:80]}"
            continue
        expected = expected or [x.clone() for x in results]
        pairs = zip(results, expected, strict=True)
        error = max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in pairs)
        if error > 0.02 and tuple(setting.order(pack.lengths)) == pack.lengths:
            why[setting.name] = f"wrong: differs by {error:.2g}"
        else:
            found.append(tried)
    return found, why


def bound(pack: Pack) -> float:
    """Share of one long document's speed that is left where causal tiles hold fewer pairs."""
    tiles = sum(n * (n + 1) / 2 for n in (-(-length // 128) for length in pack.lengths))
    return pack.pairs / (tiles * 128**2)


def speeds(tried: Tried, pack: Pack) -> tuple[float, float]:
    """TFLOP/s of the forward and of the backward."""
    flops = 4 * tried.alone.setup.heads * tried.alone.setup.dim * pack.pairs / 1e9
    there, back = (statistics.median(times) for times in zip(*tried.times[1:], strict=True))
    return flops / there, 2.5 * flops / back


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="64/8,32/32")
    parser.add_argument("--seconds", type=float, default=110)
    options = parser.parse_args()
    until, lines = time.perf_counter() + options.seconds, list[str]()
    long = 0.0, 0.0
    for heads, heads_kv in (map(int, text.split("/")) for text in options.heads.split(",")):
        setup = Setup(0, 1, "", heads, heads_kv, 128, torch.bfloat16, "fa4")
        for pack in sorted((x for x in packs(4) if x.name.startswith(PACKS)), key=lambda x: len(x.lengths)):
            tried, why = prepared(pack, setup, until)
            for _ in range(7):
                for each in tried:
                    each.run()
            found = {each.setting.name: speeds(each, pack) for each in tried}
            own = found["fa4"]
            long = own if len(pack.lengths) == 1 else long
            most = " / ".join(f"{bound(pack) * x:.0f}" for x in long)
            for name, (there, back) in found.items():
                share = f"{100 * there / own[0]:.0f} / {100 * back / own[1]:.0f}"
                lines.append(
                    f"| {pack.name}, {heads}/{heads_kv} | {name} | {there:.0f} / {back:.0f} | {share} | {most} |"
                )
            lines += [f"| {pack.name}, {heads}/{heads_kv} | {name} | {text} | – | – |" for name, text in why.items()]
            print(f"{pack.name}, {heads}/{heads_kv} done", flush=True)
            del tried
            torch.cuda.empty_cache()
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, forward / backward\n")
    print("| pack, heads | setting | TFLOP/s | % of fa4 | bound |\n|---|---|---|---|---|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
