"""Compiles without what torch does after each of them: a flush of the CPU's cache, to time the guards once, takes half
of a small compile. `TORCH_DYNAMO_RUN_GC_AFTER_COMPILE=0` (tests/conftest.py) leaves the garbage collection out too."""

from __future__ import annotations

from torch._dynamo import guards


def leave_guards_untimed() -> None:
    if hasattr(guards, "profile_guard_manager"):  # a private part of torch, only for speed
        guards.profile_guard_manager = lambda *_: 0.0
