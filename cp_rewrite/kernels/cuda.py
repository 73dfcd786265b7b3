"""Compile, cache and launch the CUDA C++ of `csrc/`: NVRTC through cuda-core, no nvcc and no build step; launches go
straight to the CUDA driver, which takes the host a third of the time that cuda-core needs.

A kernel is compiled when it is first used, for the GPU at hand, and kept on disk under a hash of its source, the
headers, the architecture, the macros and the compiler: `$CP_REWRITE_CACHE`, else `~/.cache/cp_rewrite`. Compiling
needs no GPU, so every kernel can be checked for every architecture anywhere (`compile_kernel`).

    nvtx                        ranges that GPU profilers show
    compile_kernel, kernel      cubins, and kernels that are loaded
    Stream, on                  streams whose waits are short for the host, and blocks of work on one
    launch, Kernel              launches, and a kernel's arguments as the driver reads them
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import os
import re
import struct
import tempfile
import threading
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cp_rewrite.torch_internals import raw_stream


class nvtx:
    """A range `cp_rewrite::name` around what runs inside; nothing without a GPU."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        if _has_nvtx():
            torch.cuda.nvtx.range_push(f"cp_rewrite::{self._name}")

    def __exit__(self, *_: object) -> None:
        if _has_nvtx():
            torch.cuda.nvtx.range_pop()


@functools.cache
def _has_nvtx() -> bool:
    return torch.cuda.is_available()


SOURCES = Path(__file__).resolve().parent.parent / "csrc"
DTYPES = {torch.bfloat16: "DTYPE_BF16", torch.float16: "DTYPE_FP16", torch.float32: "DTYPE_FP32"}
"""The macro that names the elements, for kernels that do arithmetic (`csrc/rows.cuh`)."""
Macros = tuple[tuple[str, str], ...]
MXINT15: Macros = (("MXINT15", "1"),)
"""The macro by which parts of sums are MXINT15 instead (`csrc/rows.cuh`)."""


def reasons() -> list[str]:
    """Why the kernels of `csrc/` can't run here; empty: they can."""
    if not torch.cuda.is_available():
        return ["no CUDA device"]
    try:
        _core()
    except ImportError as error:
        return [f"cuda-core can't be imported ({error}): pip install 'cp_rewrite[cuda]'"]
    return []


@cache
def architecture(device: torch.device) -> str:
    """`sm_90a` and the like: from Hopper on with the features of exactly that chip."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def compile_kernel(file: str, arch: str, macros: Macros = ()) -> bytes:
    """The cubin of `csrc/<file>` for `arch`, from the disk cache or compiled now.

    Raises:
        RuntimeError: the source does not compile; the message holds the compiler's log.
    """
    path = cache_dir() / f"{Path(file).stem}-{_digest(file, arch, macros)}.cubin"
    with contextlib.suppress(OSError):
        return path.read_bytes()
    cubin = _compile(file, arch, macros)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Ranks compile at once: write aside, then rename, so that no one reads half a file.
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
            part.write(cubin)
        os.replace(part.name, path)
    except OSError as error:
        _warn_not_kept(path.parent, str(error))
    return cubin


@cache
def kernel(name: str, device: torch.device, macros: Macros = ()) -> Kernel:
    """The kernel `name` of `csrc/<name>.cu`, loaded for `device`."""
    cubin = compile_kernel(f"{name}.cu", architecture(device), macros)
    codes = parameter_codes((SOURCES / f"{name}.cu").read_text(), name)
    return Kernel(_core().ObjectCode.from_cubin(cubin).get_kernel(name), codes)


class Stream(torch.cuda.Stream):
    """A stream whose waits take the host a third of the time: torch makes an event for each."""

    def wait_stream(self, stream: torch.Stream) -> None:
        """Let what is enqueued from now on follow all that is enqueued on another stream of this GPU so far."""
        event = _events[self.device_index]
        event.record(stream)
        event.wait(self)


class _Events(threading.local):
    """A thread's event for each GPU. It is free again once a stream has been made to wait for it."""

    def __init__(self) -> None:
        self._known: dict[int, torch.cuda.Event] = {}

    def __getitem__(self, index: int) -> Any:
        return self._known.get(index) or self._known.setdefault(index, torch.cuda.Event())


_events = _Events()
_streams: dict[tuple[int, int], Stream] = {}
"""By GPU and handle. Streams live as long as the process."""


def current_stream(device: torch.device) -> Stream:
    """The current stream of a tensor's device: one object for each stream, found by its handle."""
    at = device.index, raw_stream(device.index)
    known = _streams.get(at)
    if known is None:
        now = torch.cuda.current_stream(device)
        known = Stream(stream_id=now.stream_id, device_index=now.device_index, device_type=now.device_type)
        _streams[at] = known
    return known


class on:
    """A block whose work is enqueued on a stream of the current device; None: on the current stream."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = current_stream(self._stream.device)
            torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            torch.cuda.set_stream(self._before)


def launch(
    compiled: Kernel,
    grid: int | tuple[int, int],
    block: int,
    device: torch.device,
    *args: float,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Enqueue a kernel on a stream of `device`, the current one by default. Pointers are `Tensor.data_ptr()`."""
    at = raw_stream(device.index) if stream is None else stream.cuda_stream
    compiled.launch(grid if isinstance(grid, tuple) else (grid, 1), block, at, args)


@cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of the GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _core() -> Any:
    """`cuda.core`, imported when it is needed: it is an optional dependency."""
    return importlib.import_module("cuda.core")


def _compile(file: str, arch: str, macros: Macros) -> bytes:
    options = _core().ProgramOptions(
        name=file, std="c++17", arch=arch, include_path=[str(SOURCES)], define_macro=list(macros) or None
    )
    try:
        return bytes(_core().Program((SOURCES / file).read_text(), "c++", options).compile("cubin").code)
    except Exception as error:
        raise RuntimeError(f"csrc/{file} does not compile for {arch} with {dict(macros)}: {error}") from error


@cache
def _digest(file: str, arch: str, macros: Macros) -> str:
    parts = [(SOURCES / file).read_bytes()]
    parts += [header.read_bytes() for header in sorted(SOURCES.glob("*.cuh"))]
    parts.append(repr((arch, macros, _core().__version__, _nvrtc_version())).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


@cache
def _nvrtc_version() -> str:
    _, major, minor = importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()
    return f"{major}.{minor}"


def cache_dir() -> Path:
    return Path(os.environ.get("CP_REWRITE_CACHE") or os.path.expanduser("~/.cache/cp_rewrite"))


@cache
def _warn_not_kept(folder: Path, error: str) -> None:
    """Warn once that kernels are not kept, though every kernel meets the error."""
    message = (
        f"CUDA kernels can't be kept in {folder}, and are compiled by every process: {error}. Set CP_REWRITE_CACHE"
    )
    warnings.warn(message, stacklevel=2)


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
