"""Settings of fla's kernels that were fastest on Hopper: among these alone Triton tunes there.

fla gives each kernel up to 36 variants, which are compiled and timed before the first step. `BEST` has, for each set of
arguments that our calls give with heads of 128, one that is within 3 % of the fastest. Kernels that it does not name,
other GPUs and wider heads are tuned among all variants, and with CP_REWRITE_TUNE_ALL=1 everything is.

    CP_REWRITE_TUNE_ALL=1 python examples/bench/compile_time.py --gpu --cases whole --layers 4 --model kimi_linear
    python -m cp_rewrite.kernels.states.settings FOLDER...      # Triton's caches -> the lines of BEST
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

Setting = tuple[tuple[tuple[str, int], ...], int, int]
"""Of a variant: its constants by name, in alphabetical order; warps; stages."""

BEST: dict[str, tuple[Setting, ...]] = {
    "chunk_bwd_kernel_dv_local": (((), 2, 3),),
    "chunk_cp_fwd_kernel_h": (((), 4, 2), ((), 4, 3)),
    "chunk_fwd_kernel_o": (((("BK", 64), ("BV", 64)), 4, 3),),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": (((("BV", 32),), 4, 3), ((("BV", 32),), 2, 2)),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": (((("BV", 32),), 4, 4), ((("BV", 64),), 4, 2)),
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": (((("BK", 64),), 1, 3),),
    "chunk_gla_fwd_kernel_o": (((("BK", 64), ("BV", 128)), 4, 4),),
    "chunk_kda_bwd_kernel_dAv": (((), 4, 4),),
    "chunk_kda_bwd_kernel_wy_dqkg_fused": (((("BK", 64), ("BV", 64)), 4, 2),),
    "chunk_kda_fwd_kernel_inter_solve_fused": (((("BK", 32),), 1, 3),),
    "chunk_kda_fwd_kernel_intra_token_parallel": (((("BH", 2),), 1, 3),),
    "chunk_local_cumsum_scalar_kernel": (((), 4, 3),),
    "chunk_local_cumsum_vector_kernel": (((("BS", 32),), 4, 3),),
    "l2norm_bwd_kernel": (((("BT", 32),), 4, 3),),
    "l2norm_fwd_kernel": (((("BT", 16),), 4, 3),),
    "prepare_wy_repr_bwd_kernel": (((), 4, 4),),
    "recompute_w_u_fwd_kda_kernel": (((), 8, 3),),
    "recompute_w_u_fwd_kernel": (((), 4, 3),),
}
"""Kernel -> its settings."""
_CALLED = ("common", "cp", "gated_delta_rule", "gla", "kda", "utils")
"""Packages of fla.ops whose kernels run here; others have kernels of the same names."""
_WIDEST = 128
"""Widest head dims that the settings were measured with."""
_NEAR = 1.03


def tune_among_best() -> None:
    """Let Triton tune kernels of fla's modules that are imported among the settings of `BEST`."""
    if os.environ.get("CP_REWRITE_TUNE_ALL") == "1":
        return
    called = ("fla.modules.norm.", *(f"fla.ops.{package}." for package in _CALLED))
    for tuner in _tuners():
        best = BEST.get(tuner.base_fn.__name__)
        if best and tuner.base_fn.__module__.startswith(called):
            tuner.early_config_prune = partial(_among, best, tuner.early_config_prune)


def _tuners() -> Iterator[Any]:
    """Kernels that are tuned. Decorators wrap them, and modules import them from each other."""
    wrapped: Any = import_module("triton.runtime.jit").KernelInterface
    tuner: Any = import_module("triton.runtime.autotuner").Autotuner
    modules = [module for name, module in [*sys.modules.items()] if name.split(".")[0] == "fla"]
    found = dict[int, Any]()
    for kernel in (value for module in modules for value in [*vars(module).values()]):
        while isinstance(kernel, wrapped):
            if isinstance(kernel, tuner):
                found[id(kernel)] = kernel
            kernel = getattr(kernel, "fn", None)
    yield from found.values()


def _among(
    best: Sequence[Setting], plain: Any, configs: list[Any], given: Mapping[str, Any], **kwargs: Any
) -> list[Any]:
    """The variants to be timed, of those that `plain`, fla's own choice, leaves. given, kwargs: arguments."""
    left = configs if plain is None else plain(configs, given, **kwargs)
    widths = [{**given, **kwargs}.get(dim) for dim in ("K", "V")]
    if any(isinstance(width, int) and width > _WIDEST for width in widths):
        return left
    return [config for config in left if _setting(vars(config)) in best] or left


def _setting(config: Mapping[str, Any]) -> Setting:
    return tuple(sorted(config["kwargs"].items())), config["num_warps"], config["num_stages"]


def best_of(folders: Iterable[Path]) -> dict[str, tuple[Setting, ...]]:
    """Settings of each kernel that was tuned, by times in Triton's caches: the fewest that hold, for each set of
    arguments, one within 3 % of the fastest."""
    times = defaultdict[str, list[dict[Setting, float]]](list)
    for file in (file for folder in folders for file in folder.glob("*/*.autotune.json")):
        timings = json.loads(file.read_text())["configs_timings"]
        times[file.name.removesuffix(".autotune.json")].append({_setting(config): took[0] for config, took in timings})
    found = dict[str, tuple[Setting, ...]]()
    for name, calls in sorted(times.items()):
        near = [{s: took / min(call.values()) for s, took in call.items()} for call in calls]
        chosen = list[Setting]()
        while left := [call for call in near if not any(call.get(setting, _NEAR + 1) <= _NEAR for setting in chosen)]:
            serves = Counter(setting for call in left for setting, over in call.items() if over <= _NEAR)
            chosen.append(max(serves, key=lambda s: (serves[s], -sum(call.get(s, 10.0) for call in near))))
        found[name] = tuple(chosen)
    return found


if __name__ == "__main__":
    for kernel, settings in best_of(Path(folder) for folder in sys.argv[1:]).items():
        print(f'    "{kernel}": {settings},')
