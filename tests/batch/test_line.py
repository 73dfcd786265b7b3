"""A process on another machine is known to live or to be gone, whatever its Python does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cp_rewrite.agree import heartbeat
from cp_rewrite.agree.line import Door, Line

FILE = Path(heartbeat.__file__).parent / "line.py"
OTHER = f"""
import ctypes, importlib.util, sys, time
spec = importlib.util.spec_from_file_location("line", {str(FILE)!r})
line = importlib.util.module_from_spec(spec)
spec.loader.exec_module(line)
door = line.Door("far:1")
print(door.places, flush=True)
for _ in range(30):
    door.answer()
    time.sleep(0.05)
print("stuck", flush=True)
ctypes.PyDLL(None).sleep(300)  # holds Python's lock
"""


@pytest.fixture
def other() -> Iterator[tuple[Any, str]]:
    process = subprocess.Popen([sys.executable, "-c", OTHER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, process.stdout.readline().strip()
    process.kill()
    process.wait()


def asked(line: Line, answer: bool | None, seconds: float = 5.0) -> bool:
    """True if `line.stands()` comes to be `answer` within `seconds`."""
    end = time.monotonic() + seconds
    while (found := line.stands()) is not answer and time.monotonic() < end:
        time.sleep(0.05)
    return found is answer


class Store(dict[str, str]):
    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()


def test_a_process_whose_python_is_held_up_lives_until_it_is_gone(other: tuple[Any, str]) -> None:
    process, places = other
    who = {heartbeat._key("who", 1): "far:1", heartbeat._key("door", 1): places}
    watch = heartbeat.Heartbeat(Store(who), 0, 2)
    assert watch.dead() is None
    assert asked(watch._lines[1], True)
    assert process.stdout.readline().strip() == "stuck"
    for _ in range(5):
        time.sleep(0.2)
        assert watch.dead() is None
        assert watch._lines[1].stands()
    process.send_signal(signal.SIGKILL)
    assert asked(watch._lines[1], False)
    assert watch.dead() == "rank 1 of the group (far:1) died"
    assert watch.gone == {1}
    assert asked(watch._lines[1], False)  # it stays so


def test_a_line_that_never_stood_says_nothing(other: tuple[Any, str]) -> None:
    """Another process at its address is no end of a line, nor is a closed port; the next address is tried."""
    process, places = other
    closed, wrong = Line("127.0.0.1 1", "far:1"), Line(places, "elsewhere:2")
    for _ in range(20):
        assert closed.stands() is None
        assert wrong.stands() is None
        time.sleep(0.05)
    port = places.rpartition(" ")[2]
    door = Door("near:3")
    door.close()
    assert asked(Line(f"127.0.0.2,::1,127.0.0.1 {port}", "far:1"), True)
    process.kill()
    process.wait()
    assert wrong.stands() is None
