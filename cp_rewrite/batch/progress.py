"""How far this rank is: which graph it runs, and as which call since all ranks last compared something. Every rank's
heartbeat carries its own, so that ranks that wait for each other in different graphs learn why."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import astuple, dataclass

OTHER_CALL = (
    "ranks call the model with other arguments (numbers, flags, strings, which tensors there are), in another mode "
    "(train() or eval(), no_grad()), or with other attributes of its modules; TORCH_LOGS=recompiles shows which"
)


@dataclass
class Progress:
    """How far a rank is: turns of comparing that it began, calls of compiled graphs since then and in the turn before,
    and the last call's graph."""

    turn: int = 0
    calls: int = 0
    before: int = 0
    graph: int = 0

    @property
    def last_call(self) -> tuple[int, int] | None:
        """The last call's turn, and its number in that; None where a turn without calls is in between."""
        found = (self.turn, self.calls) if self.calls else (self.turn - 1, self.before)
        return found if found[1] else None


_progress: defaultdict[str, Progress] = defaultdict(Progress)
"""This rank's, by group."""


def take_turn(group: str) -> int:
    """The number of this rank's next turn of comparing."""
    mine = _progress[group]
    mine.turn, mine.calls, mine.before = mine.turn + 1, 0, mine.calls
    return mine.turn - 1


def turns(group: str) -> int:
    """How many turns this rank has begun."""
    return _progress[group].turn


def enter_graph(group: str, graph: int) -> None:
    """This rank is about to run a graph that it compiled."""
    mine = _progress[group]
    mine.calls, mine.graph = mine.calls + 1, graph


def text(group: str) -> str:
    """This rank's, as others read it."""
    return ".".join(map(str, astuple(_progress[group])))


def apart(group: str, other: str, compiles: bool) -> str:
    """How another rank, by its text, ran another graph than this one in the same call; "" where it did not.

    `compiles`: this rank, in its turn, compiles a graph for its next call.
    """
    mine, theirs = _progress[group], Progress(*map(int, other.split(".")))
    if compiles and theirs.turn == mine.turn - 1 and theirs.calls > mine.before:
        return "runs a call by a graph that it has, for which this rank compiles another"
    if theirs.last_call is None or theirs.last_call != mine.last_call or theirs.graph == mine.graph:
        return ""
    return "runs another graph in the same call than this rank"
