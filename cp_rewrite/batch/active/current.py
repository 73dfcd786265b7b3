"""Which plan is active: that of the batch whose block is open."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from cp_rewrite.ops.max_logits import watch_batch
from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import is_compiled_around

from .plan import ActivePlan

_current: ContextVar[tuple[ActivePlan, bool] | None] = ContextVar("cp_rewrite_plan", default=None)


def active_plan(sharding: Sharding) -> ActivePlan:
    """The plan of the batch in flight.

    Raises:
        RuntimeError: outside `with sharding.shard(batch)`, or inside another Sharding's.
    """
    current = _current.get()
    if current is None or not current[1]:
        raise RuntimeError("a model rewritten by cp_rewrite runs inside `with sharding.shard(batch) as local:`")
    if current[0].sharding.graph_key != sharding.graph_key:
        raise RuntimeError("the active batch was cut by another Sharding than the one the model was compiled with")
    current[0].ran = True
    return current[0]


def check_no_batch() -> None:
    """Raise inside a batch's block: two batches can't be in flight."""
    if in_batch():
        raise RuntimeError("shard() was called inside of another `with sharding.shard(batch):`; end that block first")


def check_not_traced() -> None:
    """Raise under torch.export: a program of a sharded model would hold one batch's plan. Raise under torch.compile, of
    the model or of what calls it: it would compile what another backend must."""
    if torch.compiler.is_exporting():
        raise RuntimeError("torch.export was given a model that runs sharded: export the plain model, on whole rows")
    if torch.compiler.is_compiling() or is_compiled_around():
        raise RuntimeError("torch.compile was given a model that runs sharded, compiled already: call it as it is")


def in_batch() -> bool:
    """True if a batch's block is open, of whatever annotation."""
    current = _current.get()
    return current is not None and current[1]


def is_captured() -> bool:
    """True if a CUDA graph captures what runs now: its replays run no Python."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def last_plan(sharding: Sharding) -> ActivePlan | None:
    """The plan of the last batch that was cut, whether its block has ended or not; None: of another Sharding."""
    current = _current.get()
    return None if current is None or current[0].sharding.graph_key != sharding.graph_key else current[0]


@contextmanager
def activate(plan: ActivePlan) -> Generator[None]:
    """Make `plan` the active one. It is remembered afterwards: unshard() of the outputs comes after the block."""
    token = _current.set((plan, True))
    try:
        with watch_batch(plan.sharding):
            yield
    finally:
        done, plan.batch = _current.get(), {}
        _current.reset(token)
        _current.set(None if done is None else (done[0], False))
