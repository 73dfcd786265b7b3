"""The first step speaks: of its stages on a terminal, every ten seconds elsewhere."""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cp_rewrite as cp
from cp_rewrite.calls import observe
from cp_rewrite.calls.observe import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """Lines that stay on the screen, times left out."""
        shown = [text.split("\r\x1b[K")[-1] for text in self.getvalue().split("\n")]
        return [re.sub(r"\d+\.\d s", "S s", line) for line in shown]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    found = Terminal()
    monkeypatch.setattr(observe, "sys", SimpleNamespace(stderr=found))
    monkeypatch.delenv("RANK", raising=False)
    return found


def model(x: Tensor, pos: Tensor) -> Tensor:
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def steps(count: int) -> None:
    torch._dynamo.reset()
    sharding = cp.Sharding(1, {"x": 1, "pos": 1}, cp.PositionIds("pos"), inner="aot_eager")
    compiled: Any = torch.compile(model, backend=cp.backend(sharding), fullgraph=True)
    x = torch.randn(1, 12, 8, requires_grad=True)
    for _ in range(count):
        with sharding.shard({"x": x, "pos": torch.arange(12)[None]}) as local:
            compiled(**local).square().sum().backward()


def test_stages_of_the_first_step_are_shown_once(terminal: Terminal) -> None:
    steps(3)
    stages = [f"cp_rewrite: {stage} S s" for stage in ("capture", "proof", "compile")]
    assert terminal.lines == [*stages, ""]


def test_other_ranks_write_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with progress("proof"):
        pass
    monkeypatch.setattr(observe, "PERIOD_S", 0.01)
    monkeypatch.setattr(Terminal, "isatty", lambda _: False)
    steps(1)
    assert terminal.getvalue() == ""


def test_a_log_has_a_line_for_each_period_of_a_compile_and_none_after_it(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Terminal, "isatty", lambda _: False)
    monkeypatch.setattr(observe, "PERIOD_S", 0.02)
    steps(1)
    said = terminal.getvalue()
    seconds = [float(re.fullmatch(r"cp_rewrite: compiling … ([\d.]+) s", line)[1]) for line in said.splitlines()]  # type: ignore[index]
    assert seconds == sorted({*seconds})
    assert len(seconds) > 2
    time.sleep(0.1)
    assert terminal.getvalue() == said


class Clock:
    """Time, and `threading.Timer`s that go off when it comes to them."""

    def __init__(self) -> None:
        self.now, self.set = 0.0, list["Clock.Timer"]()
        clock = self

        class Timer(Clock.Timer):
            def start(self) -> None:
                self.at += clock.now
                clock.set.append(self)

            def cancel(self) -> None:
                if self in clock.set:  # it has not gone off
                    clock.set.remove(self)

        self.threading = SimpleNamespace(Lock=threading.Lock, Timer=Timer)

    class Timer:
        def __init__(self, seconds: float, call: Callable[[], None]) -> None:
            self.at, self.call = seconds, call

    def monotonic(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        end = self.now + seconds
        while self.set and self.set[0].at <= end:
            timer = self.set.pop(0)
            self.now = timer.at
            timer.call()
        self.now = end


def test_seconds_of_a_step_add_up_and_begin_anew_with_the_next(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(Terminal, "isatty", lambda _: False)
    monkeypatch.setattr(observe, "time", clock)
    monkeypatch.setattr(observe, "threading", clock.threading)
    pulse = observe._Pulse()
    pulse.begin(4)
    clock.passes(9)
    pulse.end()
    clock.passes(60)  # the step runs
    assert terminal.getvalue() == ""
    for _ in range(3):  # backwards of segments
        pulse.begin()
        clock.passes(4)
        pulse.end()
    assert terminal.lines == [f"cp_rewrite: compiling … {n} s" for n in (10, 20)] + [""]
    clock.passes(60)
    pulse.begin(5)
    clock.passes(11)
    pulse.end()
    assert terminal.lines[2:] == ["cp_rewrite: compiling … 10 s", ""]


def test_segments_share_a_line(terminal: Terminal) -> None:
    for part in (1, 2, 3):
        with progress("compile", part, 3):
            assert terminal.lines == [f"cp_rewrite: compile of segment {part} of 3 …"]
    assert terminal.lines == ["cp_rewrite: compile of 3 segments S s", ""]
    for part in (1, 2, 3):  # as torch says when a backward is compiled, at its first run
        observe._compile_starts("LAZY_BACKWARD")
        assert terminal.lines[1:] == [f"cp_rewrite: backward of segment {part} of 3 …"]
        observe._compile_ends("LAZY_BACKWARD")
    observe._compile_starts("LAZY_BACKWARD")  # of another graph
    assert terminal.lines[1:] == ["cp_rewrite: backward of 3 segments S s", ""]


def test_a_failure_leaves_an_empty_line(terminal: Terminal) -> None:
    with pytest.raises(ValueError, match="refused"), progress("proof"):
        raise ValueError("refused")
    assert terminal.lines == [""]
