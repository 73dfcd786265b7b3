"""Where this process's main thread is, and whether it stands still."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType

import torch

_STANDARD_LIBRARY = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
"""The second is a folder of the first, and no part of it."""
_LIBRARIES = tuple(str(Path(file).parent) for file in (str(torch.__file__), Path(__file__).parent.parent, os.__file__))


def users_line() -> str:
    """Where the main thread is, outside of torch and of this package."""
    frame = _main_frame()
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno or 0  # some instructions are of no line
    return f"{file}:{line}, `{linecache.getline(file, line).strip()}`"


class Stillness:
    """How long the main thread has stood at one place of the program where it could wait for a rank."""

    def __init__(self) -> None:
        self.since, self.place = time.monotonic(), self._now()

    def seconds(self) -> float:
        """Since it was last seen to move."""
        place = self._now()
        if place is None or place != self.place:
            self.since, self.place = time.monotonic(), place
        return time.monotonic() - self.since

    @staticmethod
    def _now() -> tuple[int, int] | None:
        """None: at no place where it could wait for a rank."""
        frame = _main_frame()
        return None if frame is None or _waits_for_no_rank(frame) else (id(frame), frame.f_lasti)


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _waits_for_no_rank(frame: FrameType) -> bool:
    """Whether what runs is a function of Python's standard library: collectives are torch's."""
    file = frame.f_code.co_filename
    return file.startswith(_STANDARD_LIBRARY[0]) and not file.startswith(_STANDARD_LIBRARY[1])
