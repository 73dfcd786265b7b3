"""Kernels of several ranks that wait for each other, run at once on the CPU: thousands of interleavings.

`emulated/` makes fibers of CUDA threads and draws who goes on. Each seed is a sequence of calls (forward, backward, and
the exchange on one stream) over the routes below; every row is checked when a kernel would read it, and every sum. What
the host enqueues on its streams is written down once more in `emulated/driver.cpp`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cp_rewrite.documents import Documents
from cp_rewrite.kernels.cuda import SOURCES
from cp_rewrite.masks import PackedMask
from cp_rewrite.planning.routes import push
from cp_rewrite.planning.routes.gathered import gathered_route
from cp_rewrite.planning.routes.push import push_route
from tests.helpers import amount
from tests.helpers.packed import make_schedule
from tests.kernels.emulated import COMPILER, HERE, compile_cpp

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="fibers are made as Linux allows"),
    pytest.mark.xdist_group("peers_emulated"),
    pytest.mark.long,
]

KERNELS = ("rows.cuh", "peers.cuh", "push_rows.cu", "signal_wait.cu", "return_rows.cu")
MACROS = ("-DWARPS=2", "-DREMOTE_WARPS=1", "-DIN_FLIGHT=2", "-DDTYPE_FP32")
SEEDS, SEEDS_FOR_MUTANTS = amount.examples(1500, 400), 400

CASES: tuple[tuple[list[int], str, PackedMask], ...] = (
    ([24], "balanced", PackedMask()),
    ([2, 30], "head_tail", PackedMask()),
    ([24], "dual_chunk", PackedMask()),
    ([5, 19], "dual_chunk", PackedMask()),
    ([40, 8], "contiguous", PackedMask()),
    ([20, 12], "contiguous", PackedMask()),
    ([24, 4, 20], "balanced", PackedMask()),
    ([9, 1, 14], "balanced", PackedMask()),
    ([24], "contiguous", PackedMask(False)),
    ([3, 21], "contiguous", PackedMask(True, (7, 0))),
    ([6] * 4, "contiguous", PackedMask()),  # no row travels, or few do
    ([1, 1, 2, 2, 2, 2], "contiguous", PackedMask()),
    ([1], "contiguous", PackedMask()),
)
FILLING = 3
Route = dict[str, NDArray[np.integer]]
Routes = list[tuple[str, list[Route]]]
"""For each case its text for `driver.cpp`, and the tables of all ranks."""

_STORE = r'asm volatile\("st\.relaxed\.sys\.global\.u32 \[%0\], %1;" ::"l"\((.*)\), "r"\((.*)\) : "memory"\);'
_LOAD = r'asm volatile\("ld\.acquire\.sys\.global\.u32 %0, \[%1\];" : "=r"\((\w+)\) : "l"\((.*)\) : "memory"\);'
PTX = {
    _STORE: r"store_flag(\1, \2);",
    _LOAD: r"\1 = load_flag(\2);",
    r'asm\("cvt\.[^;]*;"[^;]*\);': "no_conversions();",  # of half precision, which is not compiled here
}


@dataclass(frozen=True)
class Mutant:
    """`old`, which stands once in `file`, becomes `new`."""

    file: str
    old: str
    new: str


_CALL = "*(volatile u32*)(state + word) + ahead"
MUTANTS = {
    "sent before the copies": Mutant(
        "push_rows.cu",
        "  u32 arrived = ",
        "  if (to_peers && !blockIdx.x && !threadIdx.x) peers.signal(SENT, call);\n  u32 arrived = ",
    ),
    "nobody waits for ARRIVED": Mutant("push_rows.cu", "if (!(arrived >> to & 1))", "if (false)"),
    "the call of the other stream": Mutant("signal_wait.cu", _CALL, "state[CALLS] + (word == STARTED ? 1 : ahead)"),
    "nobody waits for LEFT": Mutant("signal_wait.cu", "ranks ? *ranks : ~0u", "ranks ? *ranks : 0u"),
    "blocks are counted on": Mutant("peers.cuh", "    *done = 0;\n", ""),
    "the first block is the last": Mutant("peers.cuh", "!= gridDim.x - 1) return", "!= 0) return"),
    "a block is not waited for": Mutant("peers.cuh", "    __syncthreads();\n", ""),
    "no fence before a block is counted": Mutant(
        "peers.cuh", "return false;\n    __threadfence_system();\n    if", "return false;\n    if"
    ),
    "gradients in place are overwritten": Mutant(
        "return_rows.cu", "first = instead < 0 && grads.in_place(row)", "first = false"
    ),
    "own copies are read though none were made": Mutant("return_rows.cu", " || holders[j] == instead", ""),
    "pulled into the next row": Mutant(
        "return_rows.cu", "grads.pulled(row, peers.rank));", "grads.pulled(row, peers.rank) + 1);"
    ),
    "only what is pulled is summed": Mutant("return_rows.cu", "j == pulled ?", "j >= pulled ?"),
    "a pull ends the call": Mutant("return_rows.cu", "!pull && peers", "peers"),
    "what peers read in place is left out": Mutant("return_rows.cu", "> (listed >= 0)", "> 2"),
    "peers' part of rows in place is lost": Mutant("return_rows.cu", "end - begin > (listed >= 0) || !grads", "!grads"),
    "a row too many is left out": Mutant("push_rows.cu", "== OWN ? skip", "== OWN ? skip + (skip > 0)"),
    "a stage is taken for the next": Mutant("push_rows.cu", "(SENT_STAGE + stage)", "(SENT_STAGE + stage + 1)"),
    "blocks of all stages are counted together": Mutant("push_rows.cu", "(staged ? stage : part - 1)", "(part - 1)"),
    "gradients of all heads are returned at once": Mutant("return_rows.cu", "heads, from, to, k", "heads, 0, heads, k"),
    "call numbers do not wrap": Mutant("peers.cuh", "(int)(seen - call) >= 0", "seen >= call"),
}


def line(array: NDArray[np.integer]) -> str:
    return " ".join(map(str, [len(array), *array.tolist()]))


def sources(route: Route, gathered: NDArray[np.integer], first: int) -> NDArray[np.integer]:
    """Where each expanded row comes from: those that count are those of the gathered route, then filling."""
    own = slice(int(route["ends"][0]))
    filling = (route["targets"][own] & 0xFFFFFFFF) >= len(gathered)
    return np.concatenate([gathered, first + route["sends"][own][filling]])


def routes(world_size: int) -> Iterator[tuple[str, list[Route]]]:
    """All cases, as they are and as with a capacity."""
    for lengths, layout, mask in CASES:
        schedule, _ = make_schedule([Documents.from_lengths(lengths)], world_size, layout, mask)
        for filling in (0, FILLING):
            ranks = [push_route(schedule, rank, cut=not filling, filling=filling) for rank in range(world_size)]
            lines = [f"{world_size}\n{schedule.local_rows} {int(ranks[0]['capacity'][0]) + filling}"]
            for rank, route in enumerate(ranks):
                used = 0 if route["place"][2] else int(schedule.expanded[rank])
                gathered = gathered_route(schedule, rank)["kv_rows"][:used]
                arrays = [route[name] for name in ("sends", "targets", "ends")]
                arrays += [route["partners"].view(np.uint32)]
                arrays += [route[name] for name in ("holder_ptr", "holders", "stages", "place")]
                arrays += [sources(route, gathered, rank * schedule.local_rows)]
                lines += [str(used), *map(line, arrays)]
            yield "\n".join(lines) + "\n", ranks


@pytest.fixture(scope="module")
def all_routes() -> Routes:
    with pytest.MonkeyPatch.context() as patch:
        # Rows may arrive while the kernel works, however few they are.
        patch.setattr(push, "PUSH_CUT_ROWS", 1)
        patch.setattr(push, "_ROWS_PER_PAIR", 1e9)
        return [route for world_size in (1, 2, 3, 4) for route in routes(world_size)]


def test_routes_are_of_many_kinds(all_routes: Routes) -> None:
    """Rows that must come first and rows that may come late, both early parts, in place or copied, ranks without
    partners, and batches of which no row is copied."""
    every = [(route["stages"].tolist(), route["place"][1:].any()) for _, ranks in all_routes for route in ranks]
    kinds = {(n > 0, early, awaited > 0, bool(in_place)) for (n, _, _, early, awaited), in_place in every}
    assert kinds >= {(True, early, False, True) for early in (0, 1)} | {(False, 0, False, True)}
    assert kinds >= {(True, 0, True, False), (False, 0, True, False), (False, 0, False, False)}
    assert not all(ranks[0]["capacity"][0] for _, ranks in all_routes)
    several = [[int(x) for route in ranks for x in route["partners"]] for _, ranks in all_routes if len(ranks) == 4]
    assert any(not any(partners) for partners in several)
    assert any(0 in partners and any(partners) for partners in several)
    assert any(all(partners) for partners in several)


def write_kernels(folder: Path, mutant: Mutant | None = None) -> None:
    """The kernels' sources with calls for their PTX statements."""
    for file in KERNELS:
        text = (SOURCES / file).read_text()
        if mutant is not None and mutant.file == file:
            assert text.count(mutant.old) == 1, f"{file} has no single {mutant.old!r}"
            text = text.replace(mutant.old, mutant.new)
        for statement, call in PTX.items():
            text = re.sub(statement, call, text)
        assert not re.search(r"\basm\b", text), f"{file} has a PTX statement that is not emulated"
        (folder / file).write_text(text)


@dataclass(frozen=True)
class Built:
    """The driver without the kernels, and its routes."""

    driver: Path
    routes: Path

    def run(self, folder: Path, seeds: int, mutant: Mutant | None = None) -> subprocess.CompletedProcess[str]:
        write_kernels(folder, mutant)
        compile_cpp(*MACROS, f"-I{folder}", HERE / "kernels.cpp", self.driver, "-o", folder / "emulated")
        command = [folder / "emulated", self.routes, "1", str(seeds)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, all_routes: Routes) -> Built:
    folder = tmp_path_factory.mktemp("emulated")
    write_kernels(folder)
    compile_cpp(*MACROS, f"-I{folder}", "-c", HERE / "driver.cpp", "-o", folder / "driver.o")
    (folder / "routes.txt").write_text("".join(text for text, _ in all_routes))
    return Built(folder / "driver.o", folder / "routes.txt")


def test_rows_and_sums_are_right_however_ranks_interleave(built: Built, tmp_path: Path) -> None:
    """No wrong row, no wrong sum and no deadlock, on 1 to 4 ranks with room for 2 to 4 blocks each."""
    done = built.run(tmp_path, SEEDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{SEEDS} seeds")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if at % 4 else ()) for at, name in enumerate(MUTANTS)]
)
def test_a_broken_protocol_is_caught(name: str, built: Built, tmp_path: Path) -> None:
    """A wrong row, a wrong sum or a deadlock, within far fewer seeds."""
    done = built.run(tmp_path, SEEDS_FOR_MUTANTS, MUTANTS[name])
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^seed \d+: ", done.stdout, re.MULTILINE)
