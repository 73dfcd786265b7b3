"""Memory of a GPU that a training step takes at its worst moment: docs/guides/memory.md shows it beside measurements.

R local rows on a rank, weights sharded over F ranks, b bytes per element of an activation (2: bf16):

    weights, gradients, AdamW   16 bytes / F of a parameter (fp32), 4 / F of a frozen one
    gathered                    b bytes per parameter: a block and those that are asked for ahead of it, one unless the
                                user says so, and what is in no block; all blocks up to it where none is dropped behind
                                its forward. Of experts that n ranks share 1 / n, here as below
    activations                 b R × the elements per token that the backward reads, of every layer; of a
                                checkpointed layer those that enter it. And states at cuts of pieces, in fp32
    and the largest of
      the loss                  b R × logits per token, whose place their gradient takes; three times if returned: with
                                them comes a gradient of zeros. With tiles those of a tile, twice. And the gradients
                                of the hidden states and of the head
      a layer's backward        its elements again where it is checkpointed, and the gradients of its two widest tensors
                                and of what enters it; or of attention, with the keys of other ranks or their gradients
                                on the way home. With tiles no more of its wide tensors than a tile holds. And b bytes
                                per parameter for the layer's gradients, 4 for those of the layer behind it, which
                                FSDP2 sums over ranks meanwhile
      the end                   the gradients of what is in no block, in b bytes and in 4, and summed in 4 / F

Without gradients of an earlier micro-batch, those of a layer come as its activations go.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

from .constants import LAYERS_ON_DEVICE, TILE_BYTES, TILE_ROWS

GIB = 1 << 30
NEWER_TORCH = "torch 2.13 or newer"
"""FSDP needs it where some of the ranks share experts, and not all."""


@dataclass(frozen=True)
class Layer:
    """One layer of a model. Elements are counted per token.

    Args:
        parameters: that are gathered together. trained: of these, those that have gradients. experts: of these, those
            of experts that ranks can share.
        enters: elements that come in. kept: elements that its backward reads, those among them.
        before_attention: of `kept`, those that are still there when attention's backward runs.
        widest: elements of its widest tensor. wide: of `kept`, those in tensors that tiles of rows would hold. grouped:
            of the widest whose rows are sorted by expert, which no tile holds.
        queries, keys: elements of attention's queries, and of its keys and values; 0 without attention.
        states: bytes that its recurrences keep of each cut piece.
        work: multiplications of its matrix products, attention's left out.
        checkpointed: what it keeps is computed again in the backward.
    """

    parameters: int
    trained: int
    enters: float
    kept: float
    before_attention: float
    widest: float
    queries: float = 0.0
    keys: float = 0.0
    wide: float = 0.0
    grouped: float = 0.0
    states: int = 0
    work: float = 0.0
    checkpointed: bool = False
    experts: int = 0


@dataclass(frozen=True)
class Needs:
    """Needs of a model's training step, whatever the machine.

    Args:
        layers: all of them. parameters, trained: of what is in no layer, embeddings and head.
        kept: elements per token that the backward reads outside of layers. logits: elements per token of the loss's
            logits, 0 where the model has none. returned: the model returns them beside its loss. whole_logits: no tile
            holds some rows of them. work: multiplications of matrix products outside of layers, per token.
        experts: how many each layer with experts has, or what these numbers have as their greatest common divisor; 0:
            there are none that ranks can share. chosen: experts that a token has.
    """

    layers: tuple[Layer, ...]
    parameters: int
    trained: int
    kept: float
    logits: float
    returned: bool = False
    whole_logits: bool = False
    work: float = 0.0
    experts: int = 0
    chosen: int = 0

    @property
    def flops(self) -> float:
        """FLOPs that matrix products take for a token, forward and backward; of checkpointed layers twice forward."""
        return 6 * self.work + sum((8 if layer.checkpointed else 6) * layer.work for layer in self.layers)

    @property
    def all_parameters(self) -> int:
        return self.parameters + sum(layer.parameters for layer in self.layers)

    def checkpointed(self) -> Needs:
        """The same with every layer checkpointed."""
        return replace(self, layers=tuple(replace(layer, checkpointed=True) for layer in self.layers))

    def of_loss(self) -> Needs:
        """The same of a model that returns its loss alone."""
        return replace(self, returned=False, whole_logits=False)


@dataclass(frozen=True)
class Share:
    """The share of one rank.

    Args:
        rows: local rows. expanded: KV rows that its attention reads, copies included. cuts: cut pieces of its
            sequences, whose states recurrences keep.
        ranks: over which weights, gradients and optimizer states are sharded; 1: they are whole on each (DDP).
        item_bytes: of an element of activations and gathered weights.
        on_host: what lies there between its uses, as `parallelize(offload=…)` names it.
        tile: as `Sharding(tile=…)`: of logits and of wide MLPs that are checkpointed there are a tile's; None: all.
        accumulated: gradients of an earlier micro-batch are there.
        experts: ranks that share one set of experts, as `parallelize(experts=…)` has it.
        resharded: blocks' weights are dropped behind their forward. prefetch: blocks whose weights are asked for ahead.
    """

    rows: int
    expanded: int
    ranks: int
    cuts: int = 0
    item_bytes: int = 2
    on_host: Collection[str] = ()
    tile: int | Literal["auto"] | None = None
    accumulated: bool = True
    experts: int = 1
    resharded: bool = True
    prefetch: int = 1

    def gathered(self, layer: Layer, count: int) -> int:
        """The part of `count`, a layer's parameters or the trained ones, that a rank has while the layer runs."""
        away = layer.experts - layer.experts // self.experts
        return count - count * away // max(1, layer.parameters)

    def tile_rows(self, widest: float) -> float:
        """Rows of a tile whose widest tensor has so many bytes a row."""
        assert self.tile is not None, "nothing is tiled"
        return min(self.rows, *((TILE_ROWS, TILE_BYTES / widest) if self.tile == "auto" else (self.tile,)))


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU at its worst moment, by what takes them.

    `at`: the moment, "loss", "layer" or "end". `workspace` is there in a layer's backward and at the end, `logits` at
    the loss.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    workspace: int
    logits: int
    at: str

    @property
    def peak(self) -> int:
        """Their sum."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by what takes them."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "at"}

    def __str__(self) -> str:
        sizes = {name: amount(size, self.peak).split()[0] for name, size in self.parts.items()}
        listed = [f"{name} {size}" for name, size in sizes.items() if float(size)]
        by = f" ({', '.join(listed)})" if listed else ""
        return f"{amount(self.peak)} {_MOMENTS[self.at]}{by}"


def amount(size: int, of: int | None = None) -> str:
    """Bytes in words: in GiB, or in MiB where these, or the whole `of` that they are part of, are less than one GiB."""
    return f"{size / GIB:.1f} GiB" if (size if of is None else of) >= GIB else f"{size / 2**20:.1f} MiB"


_MOMENTS = {"loss": "at the loss", "layer": "in the backward of a layer", "end": "at the end of the backward"}


def predict(needs: Needs, share: Share) -> Memory:
    """The worst moment of a step: at the loss, in the backward of the layer that needs most, or at the end."""
    trained = needs.trained + sum(layer.trained for layer in needs.layers)
    here = 0 if "weights" in share.on_host else 4
    always = {"weights": here * needs.all_parameters // share.ranks, "optimizer": 2 * here * trained // share.ranks}
    blocks = [share.gathered(layer, layer.parameters) for layer in needs.layers]
    outside = share.item_bytes * needs.parameters
    ahead = share.prefetch if share.resharded else len(blocks)
    gathered = [outside + share.item_bytes * sum(blocks[max(0, i - ahead) : i + 1]) for i in range(len(blocks))]
    gradients = here * trained // share.ranks if share.accumulated else 0
    away = needs.layers[:-LAYERS_ON_DEVICE] if "checkpoints" in share.on_host else ()
    activations = share.item_bytes * share.rows * (needs.kept - sum(layer.enters for layer in away))
    activations += sum(_kept(layer, share) for layer in needs.layers)

    def moment(at: str, gathered: int, *, workspace: int = 0, logits: float = 0.0) -> Memory:
        there = {"gradients": gradients, "activations": round(activations), "workspace": workspace}
        return Memory(**always, **there, gathered=gathered, logits=round(logits), at=at)

    moments = [moment("loss", gathered[-1] if gathered else outside, logits=_at_loss(needs, share))]
    gradients += _head(needs, share)  # whole until the backward ends
    behind = 0  # bytes of gradients that are being summed over ranks
    for i, layer in reversed([*enumerate(needs.layers)]):
        trained_here = share.gathered(layer, layer.trained)
        own = share.item_bytes * trained_here
        moments.append(moment("layer", gathered[i], workspace=_in_layer(layer, share) + own + behind))
        behind = 4 * trained_here
        if i >= len(away):
            activations -= _kept(layer, share)
            activations += share.item_bytes * share.rows * layer.enters if away else 0
        gradients += 0 if share.accumulated else here * layer.trained // share.ranks
    gradients -= _head(needs, share)
    last = round((share.item_bytes + 4 + 4 / share.ranks) * needs.trained)
    moments.append(moment("end", 0, workspace=last))  # nothing is gathered any more
    return max(moments, key=lambda memory: memory.peak)


def _kept(layer: Layer, share: Share) -> float:
    """Bytes that a layer keeps until its backward."""
    if layer.checkpointed:
        return share.item_bytes * share.rows * layer.enters
    return share.item_bytes * share.rows * layer.kept + share.cuts * layer.states


def _at_loss(needs: Needs, share: Share) -> float:
    """Bytes of all logits or of a tile's, and the gradients of hidden states and head."""
    item, logits = share.item_bytes, needs.logits
    hidden = needs.layers[-1].enters if needs.layers else 0.0
    if share.tile is None or needs.whole_logits or not logits:
        each = 3 * item if needs.returned else item
        return each * share.rows * logits + item * share.rows * hidden + _head(needs, share)
    rows = share.tile_rows(4 * logits)
    # A tile's logits and their gradient. The head's gradient is summed in fp32.
    return 2 * item * rows * logits + item * share.rows * hidden + _head(needs, share) * (4 + item) / item


def _head(needs: Needs, share: Share) -> int:
    """Bytes of the gradient of the weight that makes the logits."""
    return round(share.item_bytes * needs.logits * needs.layers[-1].enters) if needs.layers and needs.trained else 0


def _in_layer(layer: Layer, share: Share) -> int:
    """Bytes that a layer's backward takes beside what was kept for it."""
    item, rows = share.item_bytes, share.rows
    again = layer.kept - layer.enters if layer.checkpointed else 0.0
    states = share.cuts * layer.states if layer.checkpointed else 0
    gone = layer.kept - layer.before_attention
    # Gradients of outputs and queries, the latter in fp32 too; foreign keys, and their gradients in fp32. Behind that
    # gradients of keys on their way home, sorted by rank in fp32, and their sums.
    inside = rows * (2 * item + 4) * layer.queries + share.expanded * (item + 4) * layer.keys
    behind = rows * item * layer.queries + (share.expanded * item + rows * 2 * 4) * layer.keys
    attention = max(inside, behind) + item * rows * (again - gone)
    if share.tile is None or not layer.checkpointed or not layer.wide:
        return states + round(max(item * rows * (again + 2 * layer.widest + layer.enters), attention))
    tile = share.tile_rows(item * layer.widest)
    sums = 4 * share.gathered(layer, layer.parameters)  # of gradients, in fp32
    tiled = item * tile * (layer.wide + 2 * layer.widest) + sums
    outside = item * rows * (again - layer.wide + 2 * max(layer.enters, layer.grouped))
    return states + round(max(outside + tiled, attention))


class Way(NamedTuple):
    """One more thing that is done to save memory; needs and share are those with all that was done before it."""

    what: str
    needs: Needs
    share: Share

    @property
    def memory(self) -> Memory:
        return predict(self.needs, self.share)


def ways(needs: Needs, share: Share, most_ranks: int = 64, node: int | None = None) -> Iterator[Way]:
    """Ways to save memory, from the cheapest on, each beside those before it; last more ranks, doubled each time.

    node: ranks of a node, of which some share a set of experts; None: all.
    """
    if not share.resharded:
        share = replace(share, resharded=True)
        yield Way("parallelize(reshard_after_forward=True)", needs, share)
    if not all(layer.checkpointed for layer in needs.layers):
        needs = needs.checkpointed()
        yield Way("gradient checkpointing of the layers", needs, share)
    tiled = replace(share, tile="auto")
    if share.tile is None and predict(needs.of_loss(), tiled).peak < predict(needs, share).peak:
        needs, share = needs.of_loss(), tiled
        yield Way("Sharding(tile='auto'): never all logits at once", needs, share)
    together = math.gcd(needs.experts, node or share.ranks) if needs.experts else 1
    if together > share.experts and "weights" not in share.on_host:
        share = replace(share, experts=together)
        yield Way(f"parallelize(experts={together}){f' with {NEWER_TORCH}' * (together < share.ranks)}", needs, share)
    for on_host in (("checkpoints",), ("checkpoints", "weights")):
        if {*on_host} > {*share.on_host} and (len(needs.layers) > LAYERS_ON_DEVICE or "weights" in on_host):
            apart = share.experts > 1 and "weights" in on_host  # of which these are none
            share = replace(share, on_host=on_host, experts=1 if apart else share.experts)
            yield Way(f"parallelize(offload={on_host}){', experts=1' * apart}", needs, share)
    times = 2
    while share.ranks * times <= max(most_ranks, 2 * share.ranks):
        more = replace(
            share, rows=-(-share.rows // times), expanded=-(-share.expanded // times), ranks=share.ranks * times
        )
        yield Way(f"{times} times the ranks", needs, more)
        times *= 2
