"""The main thread as another thread sees it; looking harms nothing."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cp_rewrite.agree.heartbeat import MainThread, Stillness

ROOT = Path(__file__).parent.parent.parent


def seen_by_thread(look: Callable[[], Any], wait: Callable[[], object]) -> Any:
    """The result of `look` in a thread, once the main thread is inside `wait`."""
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: (time.sleep(0.2), seen.append(look())))
    thread.start()
    wait()
    thread.join()
    return seen[0]


def test_the_users_line_is_the_innermost_outside_of_torch() -> None:
    main, here = MainThread(), Path(__file__).name
    row = torch.ones(4)

    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(1)  # the line that is seen
        return x

    line = seen_by_thread(lambda: main.users_line(main.frames()), lambda: checkpoint(slow, row, use_reentrant=False))
    assert f"{here}:" in line
    assert line.endswith("`time.sleep(1)  # the line that is seen`")


def test_generated_code_is_not_the_users_line(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("x = " + "1 + " * 500 + "1\n")
    frames = (("<eval_with_key>.7", 3), ("<frozen importlib._bootstrap>", 2), (str(file), 1))
    line = MainThread().users_line(frames)
    assert line.startswith(f"{file}:1, `x = 1 + ")
    assert len(line) < len(str(file)) + 130


def test_frames_are_the_main_threads_from_any_thread() -> None:
    main = MainThread()
    frames = seen_by_thread(main.frames, lambda: time.sleep(1))
    assert frames[0][0] == frames[1][0] == __file__
    assert main.frames()[-1] == frames[-1]


def test_a_main_thread_moves_by_place_or_by_what_it_did() -> None:
    main = MainThread()
    still = Stillness(main.frames())

    def look() -> tuple[float, float, float]:
        still.seconds(main.frames(), "a")
        time.sleep(0.2)
        stood = still.seconds(main.frames(), "a")
        return stood, still.seconds(main.frames(), "b"), still.seconds(main.frames(), "b")

    stood, did, after = seen_by_thread(look, lambda: time.sleep(1))
    assert stood >= 0.2 > did
    assert did < after < 0.2


def test_a_wait_in_pythons_library_is_no_wait_for_a_rank() -> None:
    main = MainThread()
    still = Stillness(main.frames())

    def wait() -> None:
        with suppress(queue.Empty):
            queue.Queue[None]().get(timeout=1)

    def look() -> float:
        still.seconds(main.frames(), "")
        time.sleep(0.2)
        return still.seconds(main.frames(), "")

    assert seen_by_thread(look, wait) < 0.1


LOOKED_AT = """
import sys, threading, time, torch
from cp_rewrite.agree.heartbeat import MainThread

def look():
    main = MainThread()
    while True:
        main.frames()
        time.sleep(0.0001)

def graph(x, k):
    for _ in range(3):
        x = x.sin() * k
    return x.sum()

sys.setswitchinterval(1e-4)
threading.Thread(target=look, daemon=True).start()
end = time.monotonic() + 10
while time.monotonic() < end:
    torch._dynamo.reset()
    compiled = torch.compile(graph, backend="eager")
    for k in range(6):
        compiled(torch.ones(8, requires_grad=True), k).backward()
print("done", flush=True)
"""
"""Where the thread asked `sys._current_frames()` and followed `f_back`, this ended by signal 11 within seconds."""


@pytest.mark.slow
def test_looking_harms_nothing_while_dynamo_traces() -> None:
    run = subprocess.run([sys.executable, "-c", LOOKED_AT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.stdout.endswith("done\n"), run.stderr
