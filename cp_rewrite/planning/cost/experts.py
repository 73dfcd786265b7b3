"""How many ranks share a set of experts: what FSDP gathers against rows that travel to the owners.

F ranks, p of them on a node; n consecutive ones share a set, and the F/n that have the same experts shard these:

    gathered(n)   weights / n twice, for the forward and the backward, and gradients / n once, each times
                  (F/n - 1) / (F/n), over the link; over the adapters of the ranks that share where they are on nodes
    rows(n)       trips of the rows that a token sends to other ranks, one to each with one of its k choices, (n - 1)
                  (1 - (1 - 1/n)^k), by an all-to-all: there and back in the forward and in the backward, and once more
                  where layers are checkpointed
    waits(n)      a latency for each trip and for the counts of rows, layer by layer

    seconds(n)  = products T + gathered(n) + waits(n) + rows(n) T         of a step of T tokens a GPU

FSDP's collectives count whole, though they run beside products, where these take longer: they slow the products down by
about as much. Of 6.1 ms for a layer of Qwen3-30B-A3B on two H200 5.1 and 5.5 were saved by two ranks that share, at
16,384 and 32,768 tokens, where rows take 1.1 and 2.1 (`torchrun --nproc-per-node 2 examples/bench/experts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from .constants import PRODUCTS, TOKENS_PER_RANK
from .devices import Device


@dataclass(frozen=True)
class Mixture:
    """A model's layers of experts, all together, in a step.

    Args:
        layers: how many there are. chosen: experts that a token has in each. trips: of rows.
        gathered, summed: bytes of all experts' weights, as they are gathered for forward and backward together; and of
            their gradients, as they are summed over ranks.
        row: bytes of a token's rows in all layers, one in each.
        flops: FLOPs of the model's products for a token, forward and backward, attention left out.
    """

    layers: int
    chosen: int
    trips: int
    gathered: int
    summed: int
    row: float
    flops: float


@dataclass(frozen=True)
class Machine:
    """Ranks that weights are sharded over, ranks of a node, and the speeds."""

    ranks: int
    node: int
    device: Device


def seconds_of(mixture: Mixture, machine: Machine, n: int) -> tuple[float, float]:
    """(seconds of a step whatever its tokens, seconds for each token of a GPU) where n ranks share a set."""
    device, inside = machine.device, min(n, machine.node)
    same = machine.ranks // n
    adapters = device.node_link * (machine.node // inside)
    link = device.link if machine.ranks <= machine.node else min(device.link, adapters)
    gathered = (mixture.gathered + mixture.summed) / n * (same - 1) / same / link
    waits = 0.0
    if n > 1:
        latency = device.latency if n <= machine.node else device.node_latency
        waits = mixture.layers * (mixture.trips + 1) * latency
    to_each = 1 - (1 - 1 / n) ** mixture.chosen
    moved = to_each * ((inside - 1) / device.all_to_all + (n - inside) / device.node_link)
    products = mixture.flops / (PRODUCTS * device.forward)
    return gathered + waits, products + mixture.trips * mixture.row * moved


def choose_ranks(
    mixture: Mixture,
    machine: Machine,
    sizes: Collection[int],
    tokens: int | None = None,
    fits: Callable[[int], bool] = lambda n: True,
) -> int:
    """How many ranks are to share a set: 1, or one of `sizes`; by static facts, so that all ranks choose alike.

    Of those whose ranks are on one node, and that fit: the one with the fewest `seconds` at so many tokens a GPU.
    Without `tokens` the one that loses least at its worst, in any step of TOKENS_PER_RANK tokens or more:

        worst(n) = max over T of seconds(n) / the fewest seconds of all

    which is at the fewest tokens, where gathering weighs most, or at infinitely many, where rows do. Of equals the
    smaller. Where none of a node fits, the smallest that fits over nodes, else the largest of a node.

    Args:
        sizes: that the model and this torch can have, divisors of the ranks. tokens: of a GPU in a step.
        fits: whether a GPU has the memory for n ranks that share.
    """
    inside = sorted({1, *(n for n in sizes if machine.node % n == 0)})
    able = [n for n in inside if fits(n)]
    if not able:
        return next((n for n in sorted(sizes) if n not in inside and fits(n)), inside[-1])
    seconds = {n: seconds_of(mixture, machine, n) for n in able}
    least = TOKENS_PER_RANK if tokens is None else tokens

    def loses(at: dict[int, float]) -> dict[int, float]:
        fewest = min(at.values())
        return {n: taken / fewest for n, taken in at.items()}

    worst = loses({n: fixed + least * each for n, (fixed, each) in seconds.items()})
    if tokens is None:
        many = loses({n: each for n, (_, each) in seconds.items()})
        worst = {n: max(few, many[n]) for n, few in worst.items()}
    return min(able, key=lambda n: (worst[n], n))


def faster_up_to(mixture: Mixture, machine: Machine, n: int) -> int:
    """Tokens of a GPU up to which n ranks that share are predicted to be faster than FSDP alone."""
    (fixed, each), (alone, each_alone) = seconds_of(mixture, machine, n), seconds_of(mixture, machine, 1)
    return max(0, int((alone - fixed) / (each - each_alone)))
