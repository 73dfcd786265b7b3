"""Memory of a GPU that a training step takes at its worst moment: docs/guides/memory.md shows it beside measurements.

R local rows on a rank, weights sharded over F ranks, b bytes per element of an activation (2: bf16):

    weights, gradients, AdamW   16 bytes / F of a parameter (fp32), 4 / F of a frozen one
    gathered                    b bytes per parameter: a block and those that are asked for ahead of it, one unless the
                                user says so, and what is in no block; all blocks up to it where none is dropped behind
                                its forward. Of experts that n ranks share 1 / n, here as below; none where n = F
    activations                 b R × the elements per token that the backward reads, of every layer; of a
                                checkpointed layer those that enter it. And states at cuts of pieces, in fp32. In the
                                place of what a layer of experts keeps by its own nodes, where ranks share it: rows that
                                a rank gets and results of the first product (`ExpertLayer`)
    and the largest of
      the loss                  b R × logits per token, whose place their gradient takes; three times if returned: with
                                them comes a gradient of zeros. With tiles those of a tile, twice. And the gradients
                                of the hidden states and of the head
      a layer's backward        its elements again where it is checkpointed, and the gradients of its two widest tensors
                                and of what enters it; or of attention, with the keys of other ranks or their gradients
                                on the way home. With tiles no more of its wide tensors than a tile holds. And b bytes
                                per parameter for the layer's gradients, 4 for those of the layer behind it, which
                                FSDP2 sums over ranks meanwhile. In shared experts what `experts_backward` has at a time
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
class ExpertLayer:
    """A layer of experts that ranks can share: sizes, and the bytes that the op `cp_rewrite::experts` keeps and takes
    there with choices that are even over experts. Letters are the op's: M = k N (row, choice) pairs, R received rows.

    Args:
        experts: E. chosen: k, experts that a token has. columns: C, of a token's row. first: G, columns of the first
            product. inner: F, of what the gate gives.
        parameters: of all its experts. trained: of these, those that have gradients.
        is_op: it runs the op where no ranks share, too: a `cp.Experts`.
    """

    experts: int
    chosen: int
    columns: int
    first: int
    inner: int
    parameters: int
    trained: int
    is_op: bool = False

    def received(self, n: int) -> float:
        """Rows that one of n ranks gets for each of its own tokens: of each rank those tokens that have some of their
        k choices among the E/n experts here."""
        elsewhere = math.comb(self.experts - self.experts // n, self.chosen) / math.comb(self.experts, self.chosen)
        return n * (1 - elsewhere)

    def kept(self, n: int, item: int) -> float:
        """Bytes per token that the forward keeps where n ranks share: rows (R, C) and results of the first product (M,
        G); in int32 places of rows (N, n), (R,) and of pairs (M,), (R, k); weights of pairs in fp32; choices in int64
        and their weights."""
        rows, k = self.received(n), self.chosen
        return item * (rows * self.columns + k * self.first) + 4 * (n + rows + k + rows * k) + (4 + 8 + 4) * k

    def in_backward(self, share: Share) -> float:
        """Bytes that the op's backward takes at its worst moment beside what was kept and what comes in. Its order is
        that of `_Products.backward`."""
        item, C, G, F = share.item_bytes, self.columns, self.first, self.inner
        M, R = share.rows * self.chosen, share.rows * self.received(share.experts)
        here = self.parameters / share.experts
        down = here * F / (F + G)
        wide = 4 if share.experts_whole and item < 4 else 0  # weights are fp32: cast in the op, as their gradients are
        return max(
            item * M * (C + 2 * F + G),  # dy, dweighed; weighed and dfirst, which the gate gives
            item * (M * (C + F + G) + down),  # dy, weighed, dfirst; ddown
            item * (M * (C + G) + here),  # dfirst; ddown, dup; x before, dx behind
            item * (M + R) * C + (item + wide) * here,  # dx, its sums by row; ddown, dup, each in both dtypes
        ) + (item * here if wide else 0)


@dataclass(frozen=True)
class Layer:
    """One layer of a model. Elements are counted per token.

    Args:
        parameters: that are gathered together. trained: of these, those that have gradients.
        enters: elements that come in. kept: elements that its backward reads, those among them.
        before_attention: of `kept`, those that are still there when attention's backward runs.
        widest: elements of its widest tensor. wide: of `kept`, those in tensors that tiles of rows would hold. grouped:
            of the widest whose rows are sorted by expert, which no tile holds.
        queries, keys: elements of attention's queries, and of its keys and values; 0 without attention.
        states: bytes that its recurrences keep of each cut piece.
        work: multiplications of its matrix products, attention's left out.
        checkpointed: what it keeps is computed again in the backward.
        experts: its layers of experts that ranks can share. kept_beside, widest_beside, wide_beside: the three without
            the nodes of these.
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
    experts: tuple[ExpertLayer, ...] = ()
    kept_beside: float = 0.0
    widest_beside: float = 0.0
    wide_beside: float = 0.0

    def beside_experts(self) -> Layer:
        """The layer without what the nodes of its layers of experts keep."""
        kept, widest, wide = self.kept_beside, self.widest_beside, self.wide_beside
        return replace(self, kept=kept, widest=widest, wide=wide, grouped=0.0) if self.experts else self


@dataclass(frozen=True)
class Needs:
    """Needs of a model's training step, whatever the machine.

    Args:
        layers: all of them. parameters, trained: of what is in no layer, embeddings and head.
        kept: elements per token that the backward reads outside of layers. logits: elements per token of the loss's
            logits, 0 where the model has none. returned: the model returns them beside its loss. whole_logits: no tile
            holds some rows of them. work: multiplications of matrix products outside of layers, per token.
    """

    layers: tuple[Layer, ...]
    parameters: int
    trained: int
    kept: float
    logits: float
    returned: bool = False
    whole_logits: bool = False
    work: float = 0.0

    @property
    def expert_layers(self) -> list[ExpertLayer]:
        """Layers of experts that ranks can share."""
        return [each for layer in self.layers for each in layer.experts]

    @property
    def experts(self) -> int:
        """Experts of each of these, or the greatest common divisor of their numbers; 0: there are none."""
        return math.gcd(*(each.experts for each in self.expert_layers))

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

    @property
    def experts_whole(self) -> bool:
        """All ranks share one set: FSDP leaves experts alone."""
        return self.experts == self.ranks > 1

    def gathered(self, layer: Layer, trained: bool = False) -> int:
        """A layer's parameters, or the trained ones, that FSDP has whole on a rank while the layer runs."""
        experts = sum(each.trained if trained else each.parameters for each in layer.experts)
        here = 0 if self.experts_whole else experts // self.experts
        return (layer.trained if trained else layer.parameters) - experts + here

    def run_ops(self, layer: Layer) -> tuple[ExpertLayer, ...]:
        """A layer's layers of experts that run as one op."""
        return tuple(each for each in layer.experts if each.is_op or self.experts > 1)

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
    blocks = [share.gathered(layer) for layer in needs.layers]
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
        moments.append(moment("layer", gathered[i], workspace=_in_layer(layer, share) + behind))
        behind = 4 * share.gathered(layer, trained=True)
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
    kept = (layer if share.experts == 1 else layer.beside_experts()).kept
    return share.item_bytes * share.rows * kept + share.cuts * layer.states + _kept_by_ops(layer, share)


def _kept_by_ops(layer: Layer, share: Share) -> float:
    """Bytes that the layers of experts of a layer keep which run as one op."""
    return share.rows * sum(each.kept(share.experts, share.item_bytes) for each in share.run_ops(layer))


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
    """Bytes that a layer's backward takes beside what was kept for it, with the gradients of its weights."""
    item, rows, ops, by_ops = share.item_bytes, share.rows, share.run_ops(layer), _kept_by_ops(layer, share)
    own = item * share.gathered(layer, trained=True)
    own += sum(4 * each.trained // share.ranks for each in layer.experts if share.experts_whole)
    layer = layer if share.experts == 1 else layer.beside_experts()
    again = layer.kept - layer.enters if layer.checkpointed else 0.0
    states = share.cuts * layer.states if layer.checkpointed else 0
    in_op = 0.0
    if ops:
        in_op = item * rows * (again + layer.enters) + max(each.in_backward(share) for each in ops)
        in_op += by_ops if layer.checkpointed else 0.0
        own -= 0.0 if layer.checkpointed else by_ops  # which is gone behind the op
    gone = layer.kept - layer.before_attention
    # Gradients of outputs and queries, the latter in fp32 too; foreign keys, and their gradients in fp32. Behind that
    # gradients of keys on their way home, sorted by rank in fp32, and their sums.
    inside = rows * (2 * item + 4) * layer.queries + share.expanded * (item + 4) * layer.keys
    behind = rows * item * layer.queries + (share.expanded * item + rows * 2 * 4) * layer.keys
    attention = max(inside, behind) + item * rows * (again - gone)
    if share.tile is None or not layer.checkpointed or not layer.wide:
        around = max(item * rows * (again + 2 * layer.widest + layer.enters), attention)
        return states + round(max(around + own, in_op))
    tile = share.tile_rows(item * layer.widest)
    sums = 4 * share.gathered(layer)  # of gradients, in fp32
    tiled = item * tile * (layer.wide + 2 * layer.widest) + sums
    outside = item * rows * (again - layer.wide + 2 * max(layer.enters, layer.grouped))
    return states + round(max(max(outside + tiled, attention) + own, in_op))


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
