"""Dry runs of models of `transformers` that are known by their config alone: no weights are read or made.

Fit, fit_of        a step's peak beside a GPU's memory, and what would make it fit: `python -m cp_rewrite memory`
Recipe, recipe     what to do for a model to train on so many GPUs: `python -m cp_rewrite recipe`
explain_config     the dry run: `python -m cp_rewrite explain`
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cp_rewrite.experts.choose import ExpertRanks
from cp_rewrite.experts.layers import check_size
from cp_rewrite.packing import PositionIds
from cp_rewrite.planning.cost.constants import TRIPS, TRIPS_AGAIN
from cp_rewrite.planning.cost.experts import Machine, Mixture, choose_ranks
from cp_rewrite.planning.cost.memory import NEWER_TORCH, Memory, Needs, Share, Way, amount, predict, ways
from cp_rewrite.sharding import Sharding

from .explain import Report, explain
from .target import Target


@dataclass(frozen=True)
class Fit:
    """The predicted peak of one GPU beside what it has. `options`: what else could be done -> the memory that it
    leaves, each beside those before it."""

    target: Target
    memory: Memory
    share: Share
    options: tuple[tuple[str, Memory], ...]

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.target.room

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. Bytes."""
        one = {**self.memory.parts, "peak": self.memory.peak, "at": self.memory.at}
        others = [{"what": what, "peak": memory.peak} for what, memory in self.options]
        facts = {"device_bytes": self.target.device_bytes, "room": self.target.room, "experts": self.share.experts}
        return {**facts, "fits": self.fits, "memory": one, "options": others}

    def __str__(self) -> str:
        ranks, together = self.share.ranks, self.share.experts
        shared = f", experts={together}{f' with {NEWER_TORCH}' * (together < ranks)}" if together > 1 else ""
        lines = [
            f"{self.target.rows} tokens a GPU, {self.target.world_size} ranks share a row, weights sharded over "
            f"{ranks}{shared}; fp32 weights and AdamW, activations in bf16, gradients of an earlier micro-batch",
            *(f"{name:12} {amount(size, self.memory.peak):>12}" for name, size in self.memory.parts.items()),
            f"{'peak':12} {amount(self.memory.peak):>12} of {amount(self.target.room)}: "
            + self.target.verdict(self.memory.peak),
        ]
        return "\n".join([*lines, *self.advice])

    @property
    def advice(self) -> list[str]:
        """Lines that say what would make it fit; none where it does."""
        if self.fits:
            return []
        lines = ["what would make it fit, each beside those before it:"]
        return lines + [
            f"  {what}: {amount(memory.peak)}, {self.target.verdict(memory.peak)}" for what, memory in self.options
        ]


def fit_of(
    target: Target,
    checkpointed: bool = False,
    data_parallel: int = 1,
    *,
    loss_alone: bool = False,
    offload: Collection[str] = (),
    experts: ExpertRanks = 1,
    resharded: bool = True,
    prefetch: int = 1,
) -> Fit:
    """The peak on a target, with every layer checkpointed or as the model has them. `offload`: what lies on the host.
    `loss_alone`: the model will return no logits, though the one that was looked at does. `experts`: ranks that share
    one set of experts; `auto`: as many as the cost model has for the target's tokens, with the newest torch.
    `resharded`, `prefetch`: which weights are gathered, as of `Share`.

    Raises:
        ValueError: the target is of a function, which has no weights; or `experts` does not go with it.
    """
    if target.needs is None:
        raise ValueError(
            "memory is predicted of a module, whose weights are known, and of which the graph shows each layer"
        )
    needs = target.needs.checkpointed() if checkpointed else target.needs
    needs = needs.of_loss() if loss_alone else needs
    share = replace(target.share(data_parallel), on_host=offload, resharded=resharded, prefetch=prefetch)
    check_size(experts, share.ranks, offload)
    together = _chosen(target, needs, share) if experts == "auto" else experts
    if together > 1 and (not needs.experts or needs.experts % together):
        has = needs.experts or "none"
        raise ValueError(f"experts={together} must divide a layer's experts that ranks can share: the model has {has}")
    share, room = replace(share, experts=together), target.room
    tried: list[tuple[str, Memory]] = []
    for way in ways(needs, share, node=target.ranks_per_node):
        tried.append((way.what, way.memory))
        if way.memory.peak <= room:
            break
    return Fit(target, predict(needs, share), share, tuple(tried))


def _chosen(target: Target, needs: Needs, share: Share) -> int:
    """Ranks that share a set of experts, by the cost model: in bf16, gradients summed in fp32."""
    sizes = [n for n in range(2, share.ranks + 1) if share.ranks % n == 0 and needs.experts and needs.experts % n == 0]
    if not sizes or "weights" in share.on_host:
        return 1
    shared = needs.expert_layers
    mixture = Mixture(
        layers=len(shared),
        chosen=max(each.chosen for each in shared),
        trips=TRIPS + TRIPS_AGAIN * any(layer.checkpointed for layer in needs.layers if layer.experts),
        gathered=sum(2 * each.parameters for each in shared) * (1 + share.resharded),
        summed=sum(4 * each.trained for each in shared),
        row=sum(2 * each.columns for each in shared),
        flops=needs.flops,
    )
    machine = Machine(share.ranks, target.ranks_per_node, target.speeds)

    def fits(n: int) -> bool:
        return predict(needs, replace(share, experts=n)).peak <= target.room

    return choose_ranks(mixture, machine, sizes, share.rows, fits)


RULE = "chosen: the fewest options by which a step fits where all GPUs share a row, then the fewest GPUs that fit one"


@dataclass(frozen=True)
class Recipe:
    """The least that has to be done for a model to train on so many GPUs, and how to start it.

    Args:
        folder, tokens, gpus: what was asked for: the model's folder, tokens of a row, all GPUs.
        ranks: that share a row in the mesh of `code`; the others are data parallel. The mesh of `command` is all GPUs,
            which share as many rows.
        way: what is done. memory, seconds: of one GPU and a step of one row a group, with it.
        longest: tokens of the longest row that all GPUs together could share with it.
        kept_whole: the memory if blocks' weights stay whole behind their forward, and are gathered once a step, not
            twice; None: that does not fit.
    """

    folder: str
    tokens: int
    gpus: int
    ranks: int
    target: Target
    way: Way
    memory: Memory
    seconds: float
    longest: int
    kept_whole: Memory | None = None

    @property
    def checkpointed(self) -> bool:
        return all(layer.checkpointed for layer in self.way.needs.layers)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. Bytes, tokens, seconds."""
        return {
            "mesh": {"dp": self.gpus // self.ranks, "cp": self.ranks},
            "command_mesh": {"cp": self.gpus} if self.command else None,
            "checkpointed": self.checkpointed,
            "tile": self.way.share.tile,
            "offload": [*self.way.share.on_host],
            "experts": self.way.share.experts,
            "peak": self.memory.peak,
            "room": self.target.room,
            "tokens_per_second": self.tokens * self.gpus / self.ranks / self.seconds,
            "longest_row": self.longest,
            "peak_without_reshard": self.kept_whole and self.kept_whole.peak,
            "command": self.command,
            "code": self.code,
        }

    @property
    def command(self) -> str:
        """The launch line of the example, for checkpoints of Hugging Face; "" with experts that ranks share, which it
        does not load."""
        share, rows = self.way.share, self.gpus // self.ranks
        if share.experts > 1:
            return ""
        words = [
            f"torchrun --nproc-per-node {self.gpus // self.target.nodes}",
            *([f"--nnodes {self.target.nodes}"] if self.target.nodes > 1 else []),
            f"examples/train_checkpoint.py {self.folder} --data YOUR_TEXTS --tokens {self.tokens}",
            *([f"--rows {rows}"] if rows > 1 else []),
            *(["--checkpointing"] if self.checkpointed else []),
            *(["--tile"] if share.tile else []),
            *(["--offload", *share.on_host] if share.on_host else []),
        ]
        return " ".join(words)

    @property
    def code(self) -> str:
        """The lines of a loop of one's own that differ from model to model."""
        share = self.way.share
        tile = ', tile="auto"' if share.tile else ""
        more = f", offload={(*share.on_host,)}" if share.on_host else ""
        more += f", experts={share.experts}" if share.experts > 1 else ""
        lines = [
            f'mesh = init_device_mesh("cuda", ({self.gpus // self.ranks}, {self.ranks}), mesh_dim_names=("dp", "cp"))',
            f'sharding = cp.Sharding(mesh["cp"], tokens, cp.PositionIds("position_ids"){tile})',
            *(['model.gradient_checkpointing_enable({"use_reentrant": False})'] if self.checkpointed else []),
            "half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)",
            f"model = cp.parallelize(model, mesh, sharding, mp_policy=half{more})"
            + f"  # with {NEWER_TORCH}" * (1 < share.experts < share.ranks),
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        groups = self.gpus // self.ranks
        done = [
            *(["blocks checkpointed"] if self.checkpointed else []),
            *(["tile"] if self.way.share.tile else []),
            *([f"{self.way.share.experts} ranks share experts"] if self.way.share.experts > 1 else []),
            *(f"{name} on the host" for name in self.way.share.on_host),
        ]
        speed = self.tokens * groups / self.seconds
        together = f", with a mesh of its own: all {self.gpus} GPUs share the {groups} rows of a batch" * (groups > 1)
        shared = f"{self.ranks} GPUs share" if self.ranks > 1 else "each GPU has"
        return "\n".join(
            [
                f"mesh (dp, cp) = ({groups}, {self.ranks}): {shared} a row of {self.tokens:,} tokens; "
                + (", ".join(done) or "nothing else needed"),
                f"{RULE}{'; one option more may let fewer' * (self.ranks > 1)}",
                f"peak {amount(self.memory.peak)} of {amount(self.target.room)} a GPU: "
                f"{self.target.verdict(self.memory.peak)}; one batch a step",
                f"about {speed:,.0f} tokens/s of all {self.gpus} GPUs, if only matrix products and attention took time",
                f"the longest row that fits so, if all {self.gpus} GPUs share it: {self.longest:,} tokens",
                *self._whole,
                "",
                *([f"a checkpoint of Hugging Face{together}:", self.command, ""] if self.command else []),
                "a loop of your own (README's lines, where they differ from model to model), with this mesh:",
                self.code,
            ]
        )

    @property
    def _whole(self) -> list[str]:
        """A line on weights that are gathered once a step, where they fit."""
        if self.kept_whole is None:
            return []
        peak = amount(self.kept_whole.peak)
        return [
            f"parallelize(reshard_after_forward=False) fits too, {peak}: weights are gathered once a step, not twice"
        ]


def recipe(folder: str, lengths: Sequence[int], gpus: int, nodes: int = 1, **options: Any) -> Recipe | Fit | Report:
    """The first of `ways` that fits where all `gpus` GPUs share a row, and the fewest ranks of a group for which it
    still does. With one way more fewer ranks might share a row: that is not looked at.

    A way is tried in the graph that it gives: what tiles hold is not known before. Arguments are those of
    `explain_config`.

    Returns:
        The report of a model that is refused, the fit of one that nothing makes fit.

    Raises:
        As `explain_config`.
    """
    report = explain_config(folder, lengths, gpus, nodes=nodes, **options)
    if report.target is None or report.target.needs is None:
        return report
    target, share = report.target, replace(report.target.share(), accumulated=False)
    found = [Way("", report.target.needs, share), *ways(report.target.needs, share, 0, report.target.ranks_per_node)]
    for way in (way for way in found if way.share.ranks == gpus and way.memory.peak <= target.room):
        if way.what:
            checkpointed = all(layer.checkpointed for layer in way.needs.layers)
            seen = explain_config(
                folder, lengths, gpus, nodes=nodes, checkpointed=checkpointed, tile=way.share.tile, **options
            ).target
            assert seen is not None, "what is right without tiles and checkpoints is right with them"
            assert seen.needs is not None
            way = Way(way.what, seen.needs.checkpointed() if checkpointed else seen.needs, way.share)
            target = seen
        if way.memory.peak <= target.room:
            return _with_fewest_ranks(folder, sum(lengths), gpus, target, way)
    return fit_of(target)


def _with_fewest_ranks(folder: str, tokens: int, gpus: int, target: Target, way: Way) -> Recipe:
    def share_of(ranks: int, tokens: int) -> Share:
        rows = -(-tokens // ranks)
        return replace(way.share, rows=rows, expanded=round(rows * way.share.expanded / max(1, way.share.rows)))

    def fits(ranks: int, tokens: int) -> bool:
        return predict(way.needs, share_of(ranks, tokens)).peak <= target.room

    ranks = next(n for n in range(1, gpus + 1) if gpus % n == 0 and (n == gpus or fits(n, tokens)))
    longest, step = tokens, tokens
    while fits(gpus, longest + step):
        longest, step = longest + step, 2 * step
    while step > 1024:
        step //= 2
        longest += step if fits(gpus, longest + step) else 0
    memory, seconds = predict(way.needs, share_of(ranks, tokens)), target.step_seconds * gpus / ranks
    longest = longest // 1024 * 1024 or longest
    whole = predict(way.needs, replace(share_of(ranks, tokens), resharded=False))
    fits_whole = gpus > 1 and whole.peak <= target.room
    return Recipe(folder, tokens, gpus, ranks, target, way, memory, seconds, longest, whole if fits_whole else None)


_CACHE = (
    "explained with use_cache=False, where the config says True: set it in training too, since with a cache "
    "transformers leaves out the mask that keeps documents apart"
)


def explain_config(
    name: str,
    lengths: Sequence[int],
    world_size: int,
    layers: int | None = None,
    nodes: int = 1,
    checkpointed: bool = False,
    **options: Any,
) -> Report:
    """Run `explain` on a causal language model in training on one packed row.

    Args:
        name: a folder with a config.json, that file, or a name that `transformers` finds.
        lengths: tokens per document of the row.
        layers: layers to look at; None: the first ones up to where each kind of layer has come, at least 2. Times and
            memory are those of all layers.
        nodes: machines that the ranks are spread over.
        checkpointed: layers are, where the model's class can.
        options: further arguments of Sharding.

    Raises:
        ImportError: `transformers` is missing. OSError: there is no such config.
        ValueError: `layers` is no whole number from 1 to the config's, or what `Sharding` and `explain` raise.
    """
    try:  # late: only this command needs it
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'cp_rewrite[transformers]'") from error

    if world_size % nodes:
        raise ValueError(f"nodes must divide the {world_size} ranks, got {nodes}")
    config = AutoConfig.from_pretrained(str(Path(name).parent) if name.endswith(".json") else name)
    text = config.get_text_config()
    notes = (_CACHE,) if getattr(text, "use_cache", False) else ()
    config.use_cache = text.use_cache = False
    with torch.device("meta"):
        kinds = _kinds_of(text, AutoModelForCausalLM.from_config(config))
    _keep_layers(text, kinds, layers)
    with no_init_weights():  # weights are memory that nothing writes; buffers, which masks are read off, hold numbers
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    if checkpointed and model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    tokens = torch.zeros_like(position_ids)
    batch = {"input_ids": tokens, "position_ids": position_ids, "labels": tokens.clone()}
    options = {"ranks_per_node": world_size // nodes, **options}
    sharding = Sharding(world_size, dict.fromkeys(batch, 1), PositionIds("position_ids"), **options)
    report = explain(model.train(), sharding, shift_labels=True)(**batch)
    kept = kinds[: text.num_hidden_layers]
    like = [i if i < len(kept) else kept.index(kind) if kind in kept else -1 for i, kind in enumerate(kinds)]
    if report.target is not None and min(like) >= 0:
        report = replace(report, target=report.target.of_all_layers(like))
    elif min(like) < 0:
        notes = (*notes, f"times and memory are those of the {len(kept)} layers that were looked at")
    return replace(report, notes=(*report.notes, *notes))


def _kinds_of(config: Any, model: nn.Module) -> list[tuple[str, int]]:
    """For each layer the config's name of it, and its parameters: experts come behind dense layers."""
    total: int = config.num_hidden_layers
    names = getattr(config, "layer_types", None) or [""] * total
    sizes = [0] * total
    for name, weight in model.named_parameters():
        found = re.search(r"\.(\d+)\.", name)
        if found and int(found[1]) < total:
            sizes[int(found[1])] += weight.numel()
    return list(zip(names, sizes, strict=True))


def _keep_layers(config: Any, kinds: Sequence[tuple[str, int]], layers: int | None) -> None:
    """Shorten the model, and every list in its config that has one entry per layer."""
    total: int = config.num_hidden_layers
    every_kind = min(total, max(2, *(kinds.index(kind) + 1 for kind in set(kinds))))
    kept: int = every_kind if layers is None else layers
    if not 1 <= kept <= total:
        raise ValueError(f"layers must be from 1 to the config's {total}, got {kept}")
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == total:
            setattr(config, name, value[:kept])
    config.num_hidden_layers = kept
