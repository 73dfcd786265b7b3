"""Where the main thread is, as another thread sees it: the line of the user's program, and whether it stands still.

`faulthandler` reads the frames. `sys._current_frames()` and `f_back` make an object for each frame, and Dynamo, which
runs the main thread's frames by itself on Python 3.11, then crashes the process.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

_STANDARD_LIBRARY = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
"""The second is a folder of the first, and no part of it."""
_GENERATED = "<eval_with_key", "<frozen "
"""How files are called that no one wrote: code of graphs, and Python's own."""
_LONGEST_LINE = 120
_LIBRARIES = tuple(str(Path(file).parent) for file in (str(torch.__file__), Path(__file__).parent.parent, os.__file__))
_FRAME = re.compile(r'  File "(.*)", line (\d+) in ')

Frames = tuple[tuple[str, int], ...]
"""(file, line) of each frame, what runs now first."""


class MainThread:
    """Reads the main thread's frames, the 100 innermost at most."""

    def __init__(self) -> None:
        self._file: Any = (
            open(os.memfd_create("frames"), "r+b", buffering=0)
            if hasattr(os, "memfd_create")
            else tempfile.TemporaryFile(buffering=0)
        )
        self._users_line = ""

    def frames(self) -> Frames:
        """Of the main thread; none where Python can't tell, as without a GIL."""
        self._file.seek(0)
        self._file.truncate()
        faulthandler.dump_traceback(self._file)
        self._file.seek(0)
        threads = self._file.read().decode(errors="replace").split("\n\n")
        main = re.compile(rf".*\bThread 0x0*{threading.main_thread().ident:x}\b", re.IGNORECASE)
        lines = next((thread.splitlines() for thread in threads if main.match(thread)), [])
        return tuple((found[1], int(found[2])) for line in lines if (found := _FRAME.match(line)))

    def users_line(self, frames: Frames) -> str:
        """Where it is by these frames, or was last seen, outside of torch and of this package."""
        found = next((frame for frame in frames if not frame[0].startswith((*_LIBRARIES, *_GENERATED))), None)
        if found is not None:
            file, line = found
            self._users_line = f"{file}:{line}, `{linecache.getline(file, line).strip()[:_LONGEST_LINE]}`"
        return self._users_line


class Stillness:
    """How long the main thread has stood at one place of the program where it could wait for a rank."""

    def __init__(self, frames: Frames) -> None:
        self._since, self._place, self._did = time.monotonic(), _waiting_place(frames), ""

    def seconds(self, frames: Frames, did: str) -> float:
        """Since it was last seen to move, or to have done anything: `did` is all that this rank did."""
        place = _waiting_place(frames)
        if place is None or (place, did) != (self._place, self._did):
            self._since, self._place, self._did = time.monotonic(), place, did
        return time.monotonic() - self._since


def _waiting_place(frames: Frames) -> Frames | None:
    """None: at no place where it could wait for a rank. Collectives are torch's, not of Python's standard library."""
    if not frames or _in_standard_library(frames[0][0]):
        return None
    return frames


def _in_standard_library(file: str) -> bool:
    return file.startswith(_STANDARD_LIBRARY[0]) and not file.startswith(_STANDARD_LIBRARY[1])
