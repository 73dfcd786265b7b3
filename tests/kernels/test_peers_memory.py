"""Memory that must stay while another stream, or a CUDA graph, uses it; streams and kernels are played here."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cp_rewrite import torch_internals
from cp_rewrite.documents import Documents
from cp_rewrite.kernels import cuda, peers
from cp_rewrite.kernels.flash import varlen
from cp_rewrite.kernels.flash.varlen import Launch
from cp_rewrite.masks import PackedMask
from cp_rewrite.ops import pushed
from cp_rewrite.planning.routes.push import push_route
from tests.helpers.kernel_cases import make_case
from tests.helpers.packed import make_schedule

ops: Any = torch.ops.cp_rewrite
HEADS, DIM = 2, 16


class Stream:
    """A stream whose work may run as late as another stream waits for it; what it reads must be there until then."""

    def __init__(self) -> None:
        self.reads: list[weakref.ref[Any]] = []

    def wait_stream(self, other: Stream) -> None:
        assert all(tensor() is not None for tensor in other.reads), "freed while another stream reads it"
        other.reads.clear()


class Copies:
    """The tensors that `contiguous` and `cat` give, by address."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.tensors: dict[int, weakref.ref[Any]] = {}
        patch.setattr(Tensor, "contiguous", self._noted(Tensor.contiguous))
        patch.setattr(torch, "cat", self._noted(torch.cat))

    def _noted(self, make: Any) -> Any:
        def noted(*args: Any) -> Tensor:
            made: Tensor = make(*args)
            self.tensors[made.data_ptr()] = weakref.ref(made)
            return made

        return noted


def _kernel(*arguments: Any) -> None:
    *_, dq, dk, dv, launch, _ = arguments
    assert isinstance(launch, Launch)
    assert launch.overlap is not None
    launch.overlap.keys_needed()
    for x in (dq, dk, dv):
        x.zero_()
    launch.overlap.gradients_written()


def _play(monkeypatch: pytest.MonkeyPatch) -> tuple[Stream, list[int], Copies]:
    """(the second stream, how many copies each launch reads, these copies), from now on."""
    main, side = Stream(), Stream()
    copies = Copies(monkeypatch)
    seen: list[int] = []

    def launch(_kernel: Any, _grid: Any, _block: int, _device: torch.device, *args: Any, stream: Stream | None) -> None:
        found = [copies.tensors[a] for a in args if isinstance(a, int) and a in copies.tensors]
        (stream or main).reads.extend(found)
        seen.append(len(found))

    def forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return q.clone(), torch.zeros(q.shape[1], q.shape[0])

    def backward(*args: Any) -> tuple[Tensor, ...]:
        return varlen.run_backward(_kernel, *args)

    buffer = torch.zeros(peers._HEADER + 2**20, dtype=torch.uint8)
    memory = peers.Channel(buffer, torch.zeros(8), 0, 2**20, None, 0, 2)
    for where, name, value in (
        (cuda, "current_stream", lambda *_: main),
        (cuda, "on", nullcontext),
        (peers, "side_stream", lambda *_: side),
        (peers, "channel", lambda *_: memory),
        (cuda, "kernel", lambda *_: None),
        (cuda, "multiprocessors", lambda *_: 1),
        (cuda, "launch", launch),
        (pushed, "load", lambda _: SimpleNamespace(forward=forward, backward=backward)),
    ):
        monkeypatch.setattr(where, name, value)
    return side, seen, copies


@pytest.mark.parametrize("rank", [0, 1], ids=["in place", "copied"])
def test_copies_outlive_the_second_stream(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    side, seen, copies = _play(monkeypatch)
    documents = Documents.from_lengths([40, 24])
    case = make_case(documents, PackedMask(), world_size=2, rank=rank, layout="contiguous")
    schedule, _ = make_schedule([documents], 2, "contiguous", PackedMask())
    route = [torch.from_numpy(array) for array in push_route(schedule, rank).values()]
    rows = schedule.local_rows
    k, v = (torch.zeros(HEADS, rows, DIM).transpose(0, 1) for _ in range(2))  # heads outside: rows are not dense
    lse = torch.zeros(case.q.shape[1], rows)
    tables = case.tables
    inputs = tables.cu_seqlens_q, tables.cu_seqlens_k, tables.pieces, tables.launches, route
    numbers = 0.1, 0.0, "fa4", True
    ops.pushed_attention.default(case.q, k, v, *inputs, *numbers, True, "group", None)
    # k and v for peers, and for this rank; a wait, if that waits for rows of peers at once.
    assert seen == [2, 2, *[0] * rank]
    assert not side.reads
    seen.clear()
    copies.tensors.clear()
    ops.pushed_attention_backward.default(case.dout, case.q, k, v, None, case.q, lse, *inputs, *numbers, "group")
    # A wait, where many blocks could keep peers out; k and v; a wait; a wait for peers' gradients, which are fetched
    # where keys are in place; the sum.
    assert seen == [*[0] * rank, 2, 2, 0, 0, *[0] * (rank == 0), 0]
    assert not side.reads


def test_a_captured_channel_outlives_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = [False]
    made = partial(peers.Channel, torch.zeros(1), torch.zeros(1), 0)
    for where, name, value in (
        (torch.cuda, "is_current_stream_capturing", lambda: capturing[0]),
        (cuda, "current_stream", lambda *_: None),
        (torch.cuda, "synchronize", lambda _: None),
        (peers.dist, "barrier", lambda *_, **__: None),
        (torch_internals, "process_group", lambda _: None),
        (peers, "_make_channel", lambda _, size, __: made(size, None, 0, 2)),
        (peers, "_channels", {}),
        (peers, "_captured", set()),
    ):
        monkeypatch.setattr(where, name, value)
    device = torch.device("cuda", 0)
    for captured in (False, True):
        size = 4096 << captured
        first = weakref.ref(peers.channel("group", "push", size, device))
        capturing[0] = captured
        assert peers.channel("group", "push", size, device) is first()
        capturing[0] = False
        assert peers.channel("group", "push", 4 * size, device).nbytes > size
        gc.collect()
        assert (first() is not None) == captured
        peers._channels.clear()


def test_calls_on_two_streams_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[str, str]] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Named) -> None:
            waits.append((self.name, other.name))

    first, second = Named("first"), Named("second")
    now: dict[str, Any] = {}
    known = peers.Channel(torch.zeros(1), torch.zeros(1), 0, 4096, None, 0, 2)
    for where, name, value in (
        (torch.cuda, "is_current_stream_capturing", lambda: now["capturing"]),
        (cuda, "current_stream", lambda _: now["stream"]),
        (peers, "_channels", {("group", "push"): known}),
        (peers, "_captured", set()),
        (peers, "_last", {}),
    ):
        monkeypatch.setattr(where, name, value)
    calls = (first, False), (first, False), (second, False), (second, False), (first, True), (second, False)
    for stream, capturing in calls:
        now.update(stream=stream, capturing=capturing)
        peers.channel("group", "push", 4096, torch.device("cuda", 0))
    assert waits == [("second", "first"), ("second", "first")]
