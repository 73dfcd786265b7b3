"""Launches of kernels straight by the CUDA driver, which take the host a third of the time that cuda-core needs."""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from functools import cache
from typing import Any

_CODES = {"u32": "I", "u64": "Q", "i64": "q", "int": "i", "float": "f"}
"""Codes of `struct` for the parameters' types in `csrc/`; pointers are `P`."""


def parameter_codes(source: str, name: str) -> str:
    """The types of a kernel's parameters, a code of `struct` each, read in its CUDA source.

    Raises:
        ValueError: the kernel is not there, or has a parameter of another type.
    """
    found = re.search(rf"__global__[^;{{]*?\b{name}\(([^)]*)\)", source)
    if found is None:
        raise ValueError(f"no kernel {name} in its source")
    codes = ""
    for parameter in found[1].split(","):
        kind = "*" if "*" in parameter else parameter.split()[0]
        if kind != "*" and kind not in _CODES:
            raise ValueError(f"{name}: the type of `{parameter.strip()}` is not known")
        codes += _CODES.get(kind, "P")
    return codes


class _Arguments(threading.local):
    """A thread's own memory for a kernel's arguments: the driver reads it without Python's lock."""

    def __init__(self, codes: str) -> None:
        self.pack = struct.Struct(f"@{codes}").pack_into
        self.values = ctypes.create_string_buffer(struct.calcsize(f"@{codes}"))
        ends = (struct.calcsize(f"@{codes[: i + 1]}") for i in range(len(codes)))
        starts = (end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True))
        first = ctypes.addressof(self.values)
        self.addresses = (ctypes.c_void_p * len(codes))(*(first + start for start in starts))


class Kernel:
    """A kernel loaded for a device. Args: loaded: cuda-core's. codes: `parameter_codes`."""

    def __init__(self, loaded: Any, codes: str) -> None:
        self._loaded = loaded  # keeps the code on the device
        self._handle = int(loaded.handle)
        self._arguments = _Arguments(codes)

    def launch(self, grid: tuple[int, int], block: int, stream: int, values: tuple[float, ...]) -> None:
        """Enqueue it on a stream of the current device, by its handle. values: numbers, pointers among them.

        Raises:
            struct.error: a value does not fit its parameter, or there are too many or too few.
            RuntimeError: the driver refused.
        """
        arguments = self._arguments
        arguments.pack(arguments.values, 0, *values)
        error = _launch_kernel()(self._handle, *grid, 1, block, 1, 1, 0, stream, arguments.addresses, None)
        if error:
            raise RuntimeError(f"a CUDA kernel could not be launched: {_error_name(error)}")


@cache
def _launch_kernel() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    function.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    return function


def _error_name(error: int) -> str:
    name = ctypes.c_char_p()
    ctypes.CDLL("libcuda.so.1").cuGetErrorName(error, ctypes.byref(name))
    return f"{(name.value or b'unknown').decode()} ({error})"
