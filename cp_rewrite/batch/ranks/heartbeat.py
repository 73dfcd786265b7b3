"""A rank that dies is named by the others, which stop instead of waiting for the group's timeout.

One daemon thread per process looks at the others every few seconds, over a connection to the group's store of its own:
nothing is added to a step.

    same machine     the process is there, or it is not
    other machine    its kernel keeps a line open, or closed it (`line.py`)

Neither asks the other's Python: a rank whose interpreter is held up for minutes is slow, and alive.

A process that ends says how: `done`, or the error that ended it. One that leaves a batch with an error says so at once,
and takes it back when it cuts the next: it may live on, and others would wait for it inside a collective. That says
nothing to ranks that left the batch with an error too. Beside its counter a rank says what it did since the ranks last
compared something (`history.py`): ranks that did not do the same wait for each other. What is found goes to stderr; a
process whose main thread then stands still for `GRACE_S`, as in a collective that waits for the other rank, is ended
with code 1. One that waits in Python's own library (a queue, a lock, another process) waits for no rank, and lives on.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from cp_rewrite.sharding import Sharding
from cp_rewrite.torch_internals import store_of

from . import history
from .line import Door, Line
from .main_thread import MainThread, Stillness

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
        history.note_error(sharding.group_name)
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

    def dead(self) -> str | None:
        """What is known of a rank that died or failed, in words; None: all are there, or ended well."""
        for other in list(self.others):
            ended = _read(self.store, "end", other)
            if self._left and ended.startswith(_LEFT):
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
            parted, frames, did = None, main.frames(), history.text(self._group)
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
        """At the end of the process: say how it ended, and whether another rank's death was why."""
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


def end_of(store: Any, rank: int) -> str:
    """How a rank ended, or left a batch, if it did."""
    end = _read(store, "end", rank)
    return "ended" if end == _DONE else end


def place_of(store: Any, rank: int) -> str:
    """The line of the user's program that a rank was last seen at, with the words before it; "" where it beats not."""
    place = _read(store, "beat", rank).partition(" ")[2].partition(" ")[2]
    return place and f", which is at {place}"


def apart(store: Any, group: str, rank: int, other: int) -> str:
    """How this rank and another one, by its last beat, did not do the same; "" where they did."""
    beat = _read(store, "beat", other).split(" ")
    return history.apart(group, rank, other, beat[1]) if len(beat) > 1 else ""


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
