"""A rank that dies is named by the others, which stop instead of waiting for the group's timeout.

One daemon thread per process looks at the others every few seconds, over a connection to the group's store of its own:
nothing is added to a step.

    same machine     the process is there, or it is not
    other machine    its kernel keeps a line open, or closed it (`line.py`)

Neither asks the other's Python: a rank whose interpreter is held up for minutes is slow, and alive.

A process that ends says how: `done`, or the error that ended it. One that leaves a batch with an error says so at once,
and takes it back when it cuts the next: it may live on, and others would wait for it inside a collective. That says
nothing to ranks that left the batch with an error too. Beside its counter a rank says what it did since the ranks last
compared something: ranks that did not do the same wait for each other. What is found goes to stderr; a process whose
main thread then stands still for `GRACE_S`, as in a collective that waits for the other rank, is ended with code 1. One
that waits in Python's own library (a queue, a lock, another process) waits for no rank, and lives on.

    MainThread, Stillness        where the main thread is, as another thread sees it, and for how long it stands still
    History, histories_apart     what this rank did since all ranks last compared something; how two ranks' parted
    watch, in_batch, Heartbeat   the thread, and what it knows of the others
    end_of, place_of, apart      what another rank says of itself, read from the store
"""

from __future__ import annotations

import atexit
import faulthandler
import linecache
import os
import re
import socket
import sys
import sysconfig
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import store_of

from .line import Door, Line

_STANDARD_LIBRARY = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
"""The second is a folder of the first, and no part of it."""
_GENERATED = "<eval_with_key", "<frozen "
"""How files are called that no one wrote: code of graphs, and Python's own."""
_LONGEST_LINE = 120
_LIBRARIES = tuple(str(Path(file).parent) for file in (str(torch.__file__), Path(__file__).parent, os.__file__))
_FRAME = re.compile(r'  File "(.*)", line (\d+) in ')

Frames = tuple[tuple[str, int], ...]
"""(file, line) of each frame, what runs now first."""


class MainThread:
    """Reads the main thread's frames, the 100 innermost at most.

    `faulthandler` reads them. `sys._current_frames()` and `f_back` make an object for each frame, and Dynamo, which
    runs the main thread's frames by itself on Python 3.11, then crashes the process.
    """

    def __init__(self) -> None:
        self._file: Any = (
            open(os.memfd_create("frames"), "r+b", buffering=0)
            if hasattr(os, "memfd_create")
            else tempfile.TemporaryFile(buffering=0)
        )
        self._users_line = ""

    def frames(self) -> Frames:
        """Frames of the main thread; none where Python can't tell, as without a GIL."""
        self._file.seek(0)
        self._file.truncate()
        faulthandler.dump_traceback(self._file)
        self._file.seek(0)
        threads = self._file.read().decode(errors="replace").split("\n\n")
        main = re.compile(rf".*\bThread 0x0*{threading.main_thread().ident:x}\b", re.IGNORECASE)
        lines = next((thread.splitlines() for thread in threads if main.match(thread)), [])
        return tuple((found[1], int(found[2])) for line in lines if (found := _FRAME.match(line)))

    def users_line(self, frames: Frames) -> str:
        """The place it is at by these frames, or was last seen, outside of torch and of this package."""
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
    """The place of a stack where it could wait for a rank, else None: collectives are torch's, not Python's own."""
    if not frames or _in_standard_library(frames[0][0]):
        return None
    return frames


def _in_standard_library(file: str) -> bool:
    return file.startswith(_STANDARD_LIBRARY[0]) and not file.startswith(_STANDARD_LIBRARY[1])


CALLS = {
    "graph": "compiles a model",
    "batch": "enters sharding.shard(batch)",
    "masks": "enters sharding.shard(batch)",
    "weights": "first calls a model that it compiled, or shards one",
    "experts": "lets ranks share experts",
    "arguments": "calls a model",
    "gradients": "calls cp.sum_gradients",
}
"""Kinds of comparisons -> what a rank does that comes to one."""
OTHER_CALL = (
    "ranks call the model with other arguments (numbers, flags, strings, which tensors there are), in another mode "
    "(train() or eval(), no_grad()), or with other attributes of its modules; TORCH_LOGS=recompiles shows which"
)
OTHER_STEP = (
    "every rank must make the same calls of the same models, and a backward of each, in one order: decide what is "
    "left out or done once more by what is equal on all ranks"
)
_MOST = 256
"""Events of a turn that are noted."""
_ERROR = "error"


@dataclass
class History:
    """One rank's history since all ranks last compared something: calls of the model, their backwards, and the thing
    that began the next comparison. Kept are the turns of comparing that it began, the turn of its last batch and calls
    since then, what it did in the turn before and in this one.

        c7.1        call 1 since the batch of turn 7 was cut begins, of a model whose weights are gathered first
        c7.1.3      it runs graph 3
        b7.1        its backward
        gradients   the turn's end: this rank calls cp.sum_gradients

    Each heartbeat carries its rank's. Of two ranks in step one's history begins with the other's, however late that is.
    Where they part, the ranks wait for each other in different collectives, or compute different things.
    """

    turn: int = 0
    batch: int = 0
    calls: int = 0
    before: list[str] = field(default_factory=list[str])
    now: list[str] = field(default_factory=list[str])

    def note(self, event: str) -> None:
        """Add what this rank does now."""
        if len(self.now) < _MOST:
            self.now.append(event)

    def of_turn(self, turn: int) -> list[str]:
        """The rank's event of a turn, as far as is known."""
        return self.now if turn == self.turn else self.before if turn == self.turn - 1 else []


_histories: defaultdict[str, History] = defaultdict(History)
"""This rank's, by group."""


def take_turn(group: str, kind: str) -> int:
    """The number of this rank's next turn of comparing, which it comes to with something of this kind."""
    mine = _histories[group]
    mine.note(kind)
    mine.turn, mine.before, mine.now = mine.turn + 1, mine.now, []
    if kind in ("batch", "masks"):
        mine.batch, mine.calls = mine.turn, 0
    return mine.turn - 1


def turns(group: str) -> int:
    """How many turns this rank has begun."""
    return _histories[group].turn


def note_start(group: str) -> None:
    """Note that a call of a model begins that meets other ranks before its graph runs."""
    mine = _histories[group]
    mine.note(f"c{mine.batch}.{mine.calls + 1}")


def note_call(group: str, graph: int) -> str:
    """Note that this rank is about to run a graph, by the number that all ranks know it by. Returns the call's name."""
    mine = _histories[group]
    mine.calls += 1
    call = f"{mine.batch}.{mine.calls}"
    mine.note(f"c{call}.{graph}")
    return call


def note_backward(group: str, call: str) -> None:
    """Note that the backward of a call begins."""
    _histories[group].note(f"b{call}")


def note_error(group: str) -> None:
    """Note that this rank left a batch with an error: what it did in this turn is compared with nothing."""
    _histories[group].now.insert(0, _ERROR)


def ended(group: str) -> str:
    """The turn before, as others read it."""
    return ",".join(_histories[group].before)


def text(group: str) -> str:
    """This rank's whole history in a group, as others read it."""
    mine = _histories[group]
    return f"{mine.turn}:{','.join(mine.before)}:{','.join(mine.now)}"


def histories_apart(group: str, rank: int, other: int, others: str) -> str:
    """How this rank and another one, by its text, did not do the same; "" where one is only late."""
    turn, before, now = (part.split(",") if i else part for i, part in enumerate(others.split(":")))
    mine, theirs = _histories[group], History(int(str(turn)), before=_events(before), now=_events(now))
    first = min(mine.turn, theirs.turn)
    return difference({rank: mine.of_turn(first), other: theirs.of_turn(first)})


def difference(ranks: Mapping[int, Sequence[str] | str]) -> str:
    """How two ranks, or the first of them and any other, did not do the same in a turn; "" where they did."""
    if len({of if isinstance(of, str) else ",".join(of) for of in ranks.values()}) == 1:
        return ""
    events = {rank: _events(of) for rank, of in sorted(ranks.items())}
    first, *others = events
    for other in others:
        if _ERROR in events[first] or _ERROR in events[other]:
            continue
        both = zip(events[first], events[other], strict=False)
        if found := next(((a, b) for a, b in both if a != b and not (a in CALLS and b in CALLS)), None):
            return _told((first, found[0]), (other, found[1]))
    return ""


def _events(of: Sequence[str] | str) -> list[str]:
    return [event for event in (of.split(",") if isinstance(of, str) else of) if event]


def _told(one: tuple[int, str], other: tuple[int, str]) -> str:
    """Two ranks' events of one turn, which differ."""
    (x, first), (y, second) = sorted([one, other], key=lambda did: _kind(did[1]))
    kinds = f"{_kind(first)} {_kind(second)}"
    if kinds == "call call":
        return f"rank {y} runs another graph in the same call than rank {x}: {OTHER_CALL}"
    if kinds == "call end" and second == "graph":
        return f"rank {x} runs a call by a graph that it has, where rank {y} compiles another: {OTHER_CALL}"
    one_did, other_did = _words(first), _words(second)
    said = {
        "backward backward": f"rank {y} runs {other_did}, where rank {x} runs {one_did}",
        "backward call": f"rank {y} calls a model again ({other_did}), where rank {x} runs {one_did}",
        "backward end": f"rank {y} skipped {one_did}, which rank {x} runs, and {other_did}",
        "call end": f"rank {x} calls a model once more ({one_did}) than rank {y}, which {other_did}",
    }
    return f"{said[kinds]}: {OTHER_STEP}"


def _kind(event: str) -> str:
    return "end" if event in CALLS else {"b": "backward", "c": "call"}[event[0]]


def _words(event: str) -> str:
    if event in CALLS:
        return CALLS[event]
    call = f"call {event.split('.')[1]} of the batch"
    return call if event.startswith("c") else f"the backward of {call}"


PERIOD_S = 2.0
GRACE_S = 25.0
_DONE = "done"
_LEFT = "left a batch: "
STORE = "the process that holds the group's store, most often rank 0, died"

_watched: dict[str, Heartbeat] = {}


def watch(sharding: Sharding) -> None:
    """Start watching the group's ranks; a second call for one group does nothing."""
    name = sharding.group_name
    if name not in _watched:
        _watched[name] = Heartbeat(store_of(sharding.group).clone(), sharding.rank, sharding.world_size, name)
        _watched[name].start()


def enter_batch(sharding: Sharding) -> None:
    """Take back that this rank left a batch with an error, if it is watched: it is in the next one."""
    if sharding.group_name in _watched:
        _watched[sharding.group_name].leave_batch(None)


def gone(sharding: Sharding) -> frozenset[int]:
    """Ranks whose process is not there any more, as of the last beat; none where the group is not watched."""
    watched = _watched.get(sharding.group_name)
    return frozenset() if watched is None else watched.gone


def reason(sharding: Sharding) -> str:
    """Why the group's store can't be reached: what is known of a rank, or that the store's own is gone."""
    watched = _watched.get(sharding.group_name)
    return (watched and watched.soon()) or STORE


@contextmanager
def in_batch(sharding: Sharding) -> Generator[None]:
    """Tell the others when this rank leaves the block with an error, if they are watched. An error of the network gets
    the words of the rank that failed first."""
    try:
        yield
    except Exception as error:
        watched = _watched.get(sharding.group_name) if sharding.check_batches else None
        if watched is not None and _of_network(error) and (found := watched.soon()):
            raise RuntimeError(f"cp_rewrite: {found}; rank {watched.rank} waited for it in a collective") from error
        if watched is not None:
            watched.leave_batch(error)
        note_error(sharding.group_name)
        raise


def _of_network(error: BaseException) -> bool:
    """True if a collective failed: a rank that is being killed closes its connections before its process is gone."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


class Heartbeat:
    """This rank's sign of life, and what it knows of the others.

    Args:
        store: a client of its own: one that waits for a key would keep this one waiting.
        rank, world_size: in the group, whose name is `group`.
    """

    def __init__(self, store: Any, rank: int, world_size: int, group: str = "") -> None:
        self.store, self.rank = store, rank
        self.others = {other: "" for other in range(world_size) if other != rank}
        """Rank -> `machine:process`, once it is known."""
        self.me = f"{socket.gethostname()}:{os.getpid()}"
        self.gone: frozenset[int] = frozenset()
        """Ranks that were found not to live, though they did not say that they end."""
        self._door: Door | None = None
        self._lines: dict[int, Line] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cp_rewrite heartbeat", daemon=True)
        self._told = False
        self._group = group
        self._left = ""
        """How this rank left its last batch, if with an error."""

    def start(self) -> None:
        with suppress(OSError):  # none is to be had: ranks on other machines live as far as is known
            self._door = Door(self.me)
            self.store.set(_key("door", self.rank), self._door.places)
        self.store.set(_key("who", self.rank), self.me)
        self._thread.start()
        atexit.register(self._leave)

    def leave_batch(self, error: Exception | None) -> None:
        """Say how this rank left a batch, if it was not said; None: it is in the next one."""
        left = "" if error is None else f"{_LEFT}{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if left != self._left:
            self._left = left
            with suppress(Exception):  # the store may be gone, and the error is what the user must see
                self.store.set(_key("end", self.rank), left)

    def left_too(self, end: str) -> bool:
        """True if this rank and one that ended so left the last batch with an error."""
        return bool(self._left) and end.startswith(_LEFT)

    def dead(self) -> str | None:
        """The news of a rank that died or failed, in words; None: all are there, or ended well."""
        for other in list(self.others):
            ended = _read(self.store, "end", other)
            if self.left_too(ended):
                continue
            lives = ended == _DONE or self._lives(other)
            self.gone = self.gone if lives else self.gone | {other}
            if ended == _DONE:
                del self.others[other]
            elif ended or not lives:
                where = self.others[other] or "not seen yet"
                return f"rank {other} of the group ({where}) {ended or 'died'}"
        return None

    def apart(self) -> str | None:
        """How this rank and another one did not do the same since ranks last compared something."""
        return next((how for r in self.others if (how := apart(self.store, self._group, self.rank, r))), None)

    def soon(self) -> str | None:
        """How the ranks parted, or which one died: one that closed its connections is gone, or says how it ends, within
        moments."""
        for _ in range(30):
            try:
                if found := self.apart() or self.dead():
                    return found
            except Exception:
                return STORE
            time.sleep(0.1)
        return None

    def _lives(self, other: int) -> bool:
        self.others[other] = self.others[other] or _read(self.store, "who", other)
        host, _, process = self.others[other].rpartition(":")
        if not process:
            return True  # it has cut no batch yet
        if host == self.me.rpartition(":")[0]:
            return _runs(int(process))
        if other not in self._lines and (places := _read(self.store, "door", other)):
            self._lines[other] = Line(places, self.others[other])
        return other not in self._lines or self._lines[other].stands() is not False

    def _run(self) -> None:
        beat, main = 0, MainThread()
        still = Stillness(main.frames())
        while not self._stop.wait(PERIOD_S):
            beat += 1
            parted, frames, did = None, main.frames(), text(self._group)
            if self._door is not None:
                self._door.answer()
            try:
                self.store.set(_key("beat", self.rank), f"{beat} {did} {main.users_line(frames)}")
                found = self.dead() or (parted := self.apart())
            except Exception:  # its server is a rank's process, which may be only slow
                found = STORE
            if found is None:  # or a machine that was only slow is back
                still = Stillness(frames)
                continue
            live = parted or found == STORE or f" {_LEFT}" in found
            seconds = still.seconds(frames, did)
            if not live or seconds > 2 * PERIOD_S:  # or this rank may be about to leave the batch too
                self._tell(found)
            if seconds > GRACE_S:
                os._exit(1)  # no Python error reaches a thread inside a collective

    def _leave(self) -> None:
        """Say at the end of the process how it ended, and whether another rank's death was why."""
        self._stop.set()
        error = getattr(sys, "last_value", None)
        try:
            self.store.set(_key("end", self.rank), f"failed: {type(error).__name__}: {error}" if error else _DONE)
            found = error and (self.dead() or self.apart() or (_of_network(error) and self.soon()))
        except Exception:
            found = None
        if found:
            self._tell(found)
        # Python aborts where a thread comes back from the store's C++ once the interpreter is being taken down.
        self._thread.join(GRACE_S)

    def _tell(self, found: str) -> None:
        if not self._told:
            self._told = True
            print(f"cp_rewrite: {found}; rank {self.rank} can't go on without it", file=sys.stderr, flush=True)


def end_of(sharding: Sharding, store: Any, rank: int) -> str:
    """How a rank ended, or left a batch, if it did. One that left the last batch with an error, as this rank did, may
    be on its way to the next."""
    end, watched = _read(store, "end", rank), _watched.get(sharding.group_name)
    if watched is not None and watched.left_too(end):
        return ""
    return "ended" if end == _DONE else end


def place_of(store: Any, rank: int) -> str:
    """The line of the user's program that a rank was last seen at, with the words before it; "" where it beats not."""
    place = _read(store, "beat", rank).partition(" ")[2].partition(" ")[2]
    return place and f", which is at {place}"


def apart(store: Any, group: str, rank: int, other: int) -> str:
    """How this rank and another one, by its last beat, did not do the same; "" where they did."""
    beat = _read(store, "beat", other).split(" ")
    return histories_apart(group, rank, other, beat[1]) if len(beat) > 1 else ""


def _read(store: Any, kind: str, rank: int) -> str:
    key = _key(kind, rank)
    return store.get(key).decode() if store.check([key]) else ""


def _key(kind: str, rank: int) -> str:
    return f"cp_rewrite/heartbeat/{kind}/{rank}"


def _runs(process: int) -> bool:
    """True if a process of this machine is there, and is no zombie that nobody has waited for."""
    try:
        os.kill(process, 0)
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or a system without /proc
        return True
