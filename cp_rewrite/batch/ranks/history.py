"""What a rank did since all ranks last compared something: calls of the model, their backwards, and with what it began
the next comparison.

    c7.1        call 1 since the batch of turn 7 was cut begins, of a model whose weights are gathered first
    c7.1.3      it runs graph 3
    b7.1        its backward
    gradients   the turn's end: this rank calls cp.sum_gradients

Each heartbeat carries its rank's. Of two ranks in step one's history begins with the other's, however late that is.
Where they part, the ranks wait for each other in different collectives, or compute different things.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

CALLS = {
    "graph": "compiles a model",
    "batch": "enters sharding.shard(batch)",
    "masks": "enters sharding.shard(batch)",
    "weights": "first calls a model that it compiled, or shards one",
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
    """One rank's: turns of comparing that it began, the turn of its last batch and calls since then, what it did in the
    turn before and in this one."""

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
        """What the rank did in a turn, as far as is known."""
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
    """All of it, as others read it."""
    mine = _histories[group]
    return f"{mine.turn}:{','.join(mine.before)}:{','.join(mine.now)}"


def apart(group: str, rank: int, other: int, others: str) -> str:
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
    """What two ranks did in each other's place."""
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
