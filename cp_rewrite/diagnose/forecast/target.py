"""What attention of a step takes on the machine that training will run on: seconds, and bytes between GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cp_rewrite.kernels.select import DeviceFacts
from cp_rewrite.passes.locality.rules.over_ranks.recurrences import OnPieces
from cp_rewrite.passes.plan_sites import between_gpus, inner_ranks, is_dry_run, most_of, spec_of, target_speeds
from cp_rewrite.passes.values.state import State
from cp_rewrite.planning.cost.constants import BESIDE_TENSORS
from cp_rewrite.planning.cost.devices import Model, SiteKind
from cp_rewrite.planning.cost.load import load_of
from cp_rewrite.planning.cost.memory import GIB, Memory, Needs, Share, predict
from cp_rewrite.planning.cost.seconds import exchange_seconds, needed_bytes, scattered_bytes
from cp_rewrite.planning.cost.tiles import imbalance
from cp_rewrite.planning.names import part_of
from cp_rewrite.planning.routes.grid import outer_schedule


@dataclass(frozen=True)
class Attention:
    """One attention site's step on the target, forward and backward, in bf16. Bytes are those of its keys and values
    (under `a2a+…` of queries and results too) that the rank which needs most gets from others in the forward; the
    backward moves up to three times as many.

    Args:
        mask: what it sees. layers: how many layers have one like it.
        seconds: by exchange that can be asked for. exchange: the one that the annotation names, or the cheapest.
        imbalance: work of the rank that has most over the mean of ranks.
        inside, across: bytes from ranks of the same node, and of other nodes.
        expanded: KV rows that a rank's kernel reads, copies included, of the rank that reads most.
    """

    mask: str
    layers: int
    seconds: dict[str, float]
    exchange: str
    imbalance: float
    inside: int
    across: int
    expanded: int


@dataclass(frozen=True)
class Target:
    """A step on the machine that training will run on.

    Args:
        device: its name. device_bytes: memory of one GPU. world_size, ranks_per_node: ranks of the group, of a node.
        rows: local rows of a rank. attention: by site. needs: what the model keeps; None where it is no module.
        tiled: heads and MLPs run in tiles, by `Sharding(tile=…)`.
        cuts: cut pieces of sequences that a rank keeps states of, of the rank with most.
        planned_for: heads and exchange that `balanced` plans later batches for; "": the layout is another one.
    """

    device: str
    device_bytes: int
    world_size: int
    ranks_per_node: int
    rows: int
    attention: tuple[Attention, ...]
    needs: Needs | None
    planned_for: str = ""
    cuts: int = 0
    tiled: bool = False

    @property
    def room(self) -> int:
        """Bytes of one GPU for tensors."""
        return self.device_bytes - BESIDE_TENSORS

    @property
    def seconds(self) -> float:
        """Of the attention of all layers, forward and backward."""
        return sum(site.layers * site.seconds[site.exchange] for site in self.attention)

    def share(self, data_parallel: int = 1) -> Share:
        """What a rank is given, with weights sharded over the group, `data_parallel` groups together."""
        expanded = max((site.expanded for site in self.attention), default=0)
        return Share(self.rows, expanded, self.world_size * data_parallel, self.cuts, tiled=self.tiled)

    @property
    def memory(self) -> Memory | None:
        """The peak of one GPU with FSDP2 over the group's ranks, fp32 weights, AdamW and activations in bf16."""
        return None if self.needs is None else predict(self.needs, self.share())

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. Seconds, bytes, rows."""
        memory = self.memory
        return {
            "device": self.device,
            "device_bytes": self.device_bytes,
            "world_size": self.world_size,
            "ranks_per_node": self.ranks_per_node,
            "rows": self.rows,
            "cuts": self.cuts,
            "planned_for": self.planned_for,
            "attention_seconds": self.seconds,
            "attention": [asdict(site) for site in self.attention],
            "memory": None if memory is None else {**memory.parts, "peak": memory.peak, "at": memory.at},
        }

    def of_all_layers(self, layers: Sequence[int]) -> Target:
        """The same for a model of which each layer is like one of these: `layers` holds its number, layer by layer."""
        if self.needs is None or not self.needs.layers or max(layers) >= len(self.needs.layers):
            return self
        kept = len(self.needs.layers)
        counts = [layers.count(i % kept) for i in range(len(self.attention))]
        fits = len(self.attention) == kept
        sites = [
            replace(site, layers=n if fits else round(len(layers) / kept))
            for site, n in zip(self.attention, counts, strict=True)
        ]
        needs = replace(self.needs, layers=tuple(self.needs.layers[i] for i in layers))
        return replace(self, attention=tuple(sites), needs=needs)

    def __str__(self) -> str:
        nodes = -(-self.world_size // self.ranks_per_node)
        lines = [
            f"machine   {self.world_size} × {self.device} on {nodes} node{'s' * (nodes > 1)}: attention "
            f"{1e3 * self.seconds:.1f} ms a step, forward and backward"
        ]
        lines += [f"          later batches are planned for {self.planned_for}"] if self.planned_for else []
        for site, count in _folded(self.attention):
            others = ", ".join(f"{n} {1e3 * s:.2f}" for n, s in site.seconds.items() if n != site.exchange)
            across = f", {_mib(site.across)} of it from other nodes" if nodes > 1 else ""
            lines.append(
                f"          {count} × {site.mask}: {1e3 * site.seconds[site.exchange]:.2f} ms by {site.exchange} "
                f"({others}); imbalance {site.imbalance:.3f}; a rank gets up to {_mib(site.inside + site.across)} of "
                f"keys and values{across}"
            )
        if (memory := self.memory) is not None:
            fits = "fits" if memory.peak <= self.room else "does NOT fit"
            lines.append(f"memory    {memory}: {fits} in {self.room / GIB:.0f} GiB")
        return "\n".join(lines)


_CAPABILITIES: Mapping[str, tuple[int, int] | None] = {
    "b200": (10, 0), "b300": (10, 3), "h200": (9, 0), "h100": (9, 0), "a100": (8, 0), "cpu": None
}  # fmt: skip

_INSTALLED = frozenset({"flash_attn.cute", "fla.ops.cp"})


def facts_of(state: State) -> tuple[str, DeviceFacts] | None:
    """The name of the machine that a dry run is for, and what kernels ask of it, with FlashAttention 4 and fla
    installed. None: the graph runs here, or nothing is known of that machine."""
    name = target_speeds(state.sharding, state.device).name
    for known, capability in _CAPABILITIES.items() if is_dry_run(state) else ():
        if known in name.lower():
            return name, DeviceFacts(capability, _INSTALLED if capability else frozenset())
    return None


def target_of(state: State, needs: Needs | None, tiled: bool = False) -> Target:
    """The target of a graph whose sites are decided."""
    speeds, ranks = target_speeds(state.sharding, state.device), state.sharding.world_size
    per_node = state.sharding.node_size or ranks
    asked, sites = state.sharding.exchange, list[Attention]()
    plan, planned_for = state.plan.plan, _planned_for(state)
    for decision in state.decisions:
        spec = spec_of(decision.site, deterministic=False)
        model = Model((spec.heads, spec.heads_kv), spec.head_dim)
        load = load_of(plan.schedule(decision.site.mask))
        inner = inner_ranks(state.sharding, spec.heads_kv)
        grids = {n: load_of(outer_schedule(plan, decision.site.mask, n)) for n in inner}
        seconds = exchange_seconds(load, speeds, model, per_node, grids) if ranks > 1 else {}
        if ranks == 1:
            seconds = {"local": exchange_seconds(load, speeds, model, 1)["needed"]}
        if "push" in seconds:  # what `needed` becomes inside of a node
            seconds["needed"] = min(seconds["needed"], seconds.pop("push"))
        chosen = asked if asked in seconds else min(seconds, key=seconds.__getitem__)
        moved = needed_bytes(load, model, per_node)
        if chosen.startswith("a2a") and chosen != "a2a":
            moved = scattered_bytes(load, grids[part_of(chosen) or max(grids)], model, per_node)
        sites.append(
            Attention(
                mask=str(decision.site.mask),
                layers=1,
                seconds=seconds,
                exchange=chosen,
                imbalance=imbalance(load.tiles),
                inside=int(moved[0].max()),
                across=int(moved[1].max()),
                expanded=int(load.expanded.max()),
            )
        )
    rows = plan.local_size * len(plan.rows)
    steps = (step.run for lowered in state.locality.lowered for step in lowered.steps)
    cuts = max((state.plan.most_cut(run.states) for run in steps if isinstance(run, OnPieces)), default=0)
    return Target(
        speeds.name, speeds.device_bytes, ranks, per_node, rows, tuple(sites), needs, planned_for, cuts, tiled
    )


def _planned_for(state: State) -> str:
    """What later batches are planned for, once the graph is compiled."""
    sharding = state.sharding
    most = most_of(state.decisions, sharding.balanced_mask)
    if most is None or sharding.world_size == 1 or sharding.layout != "balanced":
        return ""
    options = sharding.layout_options(replace(most[0], exchange=between_gpus(most[0].exchange, state)))
    narrow = "; narrower rows that travel count as key heads" if any(each.cut for each in state.decisions) else ""
    return f"{SiteKind(options.model, options.exchange)}{narrow}"


def _folded(sites: Sequence[Attention]) -> list[tuple[Attention, int]]:
    """Equal sites as one, with how many layers have it."""
    counts: dict[str, tuple[Attention, int]] = {}
    for site in sites:
        key = repr(replace(site, layers=1))
        counts[key] = site, site.layers + counts.get(key, (site, 0))[1]
    return [*counts.values()]


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
