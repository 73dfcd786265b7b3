"""Parameters that a launch hands to the CUDA driver, which is played here."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cp_rewrite.kernels import cuda

VALUES: dict[str, tuple[float, ...]] = {"P": (0, 2**63 + 5), "I": (0, 2**32 - 1), "Q": (0, 2**64 - 1), "q": (-1, 2**62),
                                        "i": (-1, 7), "f": (0.25, 3)}  # fmt: skip


def test_parameters_are_read_in_the_source() -> None:
    codes = {path.stem: cuda.parameter_codes(path.read_text(), path.stem) for path in cuda.SOURCES.glob("*.cu")}
    assert codes["signal_wait"] == "iiIIPPPii"
    assert codes["round_sums"] == "PQfPIIIPIPQPI"
    assert codes["return_rows"] == "PPIPPIIIIqIIIIIIPPii"
    for source in ("", "__global__ void f(half x) {}"):
        with pytest.raises(ValueError, match="f"):
            cuda.parameter_codes(source, "f")


@pytest.mark.parametrize("which", [0, 1])
def test_the_driver_finds_each_value_at_its_address(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small and wide ones in turns, so that some stand behind a gap."""
    codes = "iPfQIqiPIf"
    seen: list[Any] = []

    def launch(handle: int, *numbers: Any) -> int:
        *sizes, _shared, stream, addresses, extra = numbers
        values = (ctypes.string_at(at, struct.calcsize(code)) for at, code in zip(addresses, codes, strict=True))
        seen.append([struct.unpack(code, value)[0] for code, value in zip(codes, values, strict=True)])
        seen.append((handle, tuple(sizes), stream, extra))
        return len(seen) // 4

    monkeypatch.setattr(cuda, "_launch_kernel", lambda: launch)
    monkeypatch.setattr(cuda, "_error_name", str)
    kernel = cuda.Kernel(SimpleNamespace(handle=77), codes)
    values = tuple(VALUES[code][which] for code in codes)
    kernel.launch((3, 2), 64, 5, values)
    assert seen == [list(values), (77, (3, 2, 1, 64, 1, 1), 5, None)]
    with pytest.raises(RuntimeError, match="could not be launched: 1"):
        kernel.launch((3, 2), 64, 5, values)
    for wrong in (values[1:], (*values, 1), (2**32, *values[1:])):
        with pytest.raises(struct.error):
            kernel.launch((3, 2), 64, 5, wrong)


@pytest.mark.gpu
def test_streams_wait_for_each_other_by_one_event() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    main, side = cuda.current_stream(device), cuda.Stream(device)
    assert main == torch.cuda.current_stream()
    x = torch.zeros(2**20, device=device)
    for number in range(1, 5):
        side.wait_stream(main)
        with cuda.on(side), cuda.on(None):
            assert (
                cuda.current_stream(device).cuda_stream == torch.cuda.current_stream().cuda_stream == side.cuda_stream
            )
            torch.cuda._sleep(1_000_000)
            x += 1
        main.wait_stream(side)
        assert cuda.current_stream(device) is main
        assert torch.equal(x, torch.full_like(x, number))
