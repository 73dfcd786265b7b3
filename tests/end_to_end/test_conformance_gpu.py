"""Every exchange over NCCL with every kernel that runs here, on 2 and 4 GPUs, against fp32; the same code on gloo."""

from __future__ import annotations

import dataclasses
import os
import pickle
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

from tests.helpers.conformance_cells import Cell, te_cells
from tests.helpers.gpu_cells import Outcome, failures, report, run_sweep, split_able, sweep_cells, te_sweep
from tests.helpers.pool import Pool


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA GPUs")
@pytest.mark.parametrize("cells_for", [sweep_cells, te_sweep])
def test_every_exchange_with_every_kernel(
    cells_for: Callable[[int], list[Cell]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world_size = 4 if torch.cuda.device_count() >= 4 else 2
    check_on_gpus(world_size, cells_for(world_size), tmp_path, capsys)


def check_on_gpus(world_size: int, cells: Sequence[Cell], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs all cells in one set of processes, prints the report, and only then fails."""
    able, left_out = split_able(cells, torch.device("cuda", 0))
    crash = ""
    try:
        mp.spawn(gpu_rank, (world_size, free_port(), able, folder), nprocs=world_size)  # type: ignore[no-untyped-call]
    except Exception as error:
        crash = str(error)[-2000:]
    outcomes: list[Outcome] = [o for path in sorted(folder.glob("rank*")) for o in pickle.loads(path.read_bytes())]
    with capsys.disabled():
        print("\n" + "\n".join(report(world_size, outcomes, left_out)), crash)
    assert not crash
    assert not failures(outcomes)
    assert {o.cell for o in outcomes} == set(able)


def gpu_rank(rank: int, world_size: int, port: int, cells: Sequence[Cell], folder: Path) -> None:
    """One GPU's part; its outcomes go to a file, those before a crash too."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_NVLS_ENABLE="0")
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    found: list[Outcome] = []
    try:
        run_sweep(DeviceMesh("cuda", list(range(world_size)), mesh_dim_names=("cp",)), cells, found)
        dist.barrier(device_ids=[rank])
    finally:
        (folder / f"rank{rank}").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def gloo_rank(mesh: DeviceMesh, cells: Sequence[Cell]) -> list[Outcome]:
    found: list[Outcome] = []
    run_sweep(mesh, cells, found)
    return found


def test_the_same_sweep_on_gloo(pool: Pool) -> None:
    """The reference kernel's cells on short rows, but for the exchange that needs GPUs; a cell that fails is told."""
    cells = [cell for cell in sweep_cells(4, ["reference"]) if cell.exchange != "push"][::2]
    cells = [dataclasses.replace(cell, padding="between") for cell in cells]
    able, left_out = split_able(cells, torch.device("cpu"))
    assert not left_out
    broken = dataclasses.replace(able[0], kernel="fa4")
    outcomes = [o for part in pool.run(4, gloo_rank, [*able, broken]) for o in part]
    assert {o.cell for o in outcomes} == {*able, broken}
    assert len(failures(outcomes)) == 1, failures(outcomes)
    (failure,) = failures(outcomes)
    assert "fa4 | " in failure
    lines = list(report(4, outcomes, left_out))
    assert lines[-1] == f"FAILED: {failure}"
    assert all(o.error <= 1 for o in outcomes if o.cell != broken)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_full_size_on_gloo(pool: Pool) -> None:
    """TransformerEngine's cases of 12 query and 2 key/value heads, with documents of up to 4096 tokens."""
    for cell in (cell for cell in te_cells("s 4096") if cell.heads == (12, 2)):
        assert not failures([o for part in pool.run(cell.world_size, gloo_rank, [cell]) for o in part])


def test_cells_of_absent_kernels_are_left_out() -> None:
    able, left_out = split_able(sweep_cells(4), torch.device("cpu"))
    assert {cell.kernel for cell in able} == {"reference"}
    assert any("aten_flash: needs Ampere" in line or "needs a CUDA GPU" in line for line in report(4, [], left_out))
