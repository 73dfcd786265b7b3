"""The first step speaks on a terminal, and nowhere else."""

from __future__ import annotations

import io
import re
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
        """What stays on the screen, times left out."""
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


def test_nothing_is_written_without_a_terminal_or_on_other_ranks(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with progress("proof"):
        pass
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(Terminal, "isatty", lambda _: False)
    steps(1)
    assert terminal.getvalue() == ""


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
