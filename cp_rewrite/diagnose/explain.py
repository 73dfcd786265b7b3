"""A dry run: what would be rewritten, what not and why, and the graph before and after. No GPU, no process group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch import SymInt, nn

from cp_rewrite import passes
from cp_rewrite.batch.active.current import active_plan
from cp_rewrite.packing import untaken_args
from cp_rewrite.passes.capture.capture import capture
from cp_rewrite.passes.graph.diff import graph_diff, graph_lines, target_name
from cp_rewrite.passes.graph.regions import graph_modules
from cp_rewrite.passes.locality.rules.over_ranks.recurrences import OnPieces
from cp_rewrite.passes.values.resolution import Converted, OfSums
from cp_rewrite.planning.cost.memory import Needs
from cp_rewrite.planning.plan import Plan
from cp_rewrite.refusal import Refusal, folded, pages_of, source_line
from cp_rewrite.sharding import Sharding, require_sharding
from cp_rewrite.torch_internals import hint

from .forecast import page
from .forecast.needs import logits_of, needs_of
from .forecast.target import Target, facts_of, target_of
from .forecast.weights import weights_on_cpu


@dataclass(frozen=True)
class SiteReport:
    """One attention site. `where` is the source line; `exchange` and `kernel` are None when the graph is refused."""

    where: str
    mask: str
    exchange: str | None
    kernel: str | None
    why: tuple[str, ...]

    def __str__(self) -> str:
        if self.exchange is None:
            return f"proven    {self.where}\n          {self.mask}"
        reasons = "".join(f"\n          {line}" for line in self.why if line)
        return f"rewritten {self.where}\n          {self.mask} | {self.exchange} | {self.kernel}{reasons}"


@dataclass(frozen=True)
class Collective:
    """A sum over ranks that was put in, a gradient that is shared out, a read of neighbouring tokens' rows, or states
    that pass through the tokens of a row.

    Args:
        where: the source line. why: the rule that asked for it. op: what was put in.
        bytes: that travel, in the forward or in the backward; of a dim that the batch decides, for the example. Of
            neighbours and states: what the rank gets of others that gets most, of states in each direction.
    """

    where: str
    why: str
    op: str
    bytes: int

    def __str__(self) -> str:
        what = {_READ: "neighbours", _STATES: "states    "}.get(self.op, "made whole")
        return f"{what} {self.where}\n          {self.why} | {self.op} | {self.bytes:,} bytes"


@dataclass(frozen=True)
class Report:
    """What `explain` found. `str()` is the text to read.

    Args:
        sites: one entry per proven attention site. refusals: every reason against a rewrite; empty when there is none.
        ops_before, ops_after: how often each op stands in the graph; equal when refused.
        before, after: the normalised graphs, a line a node.
        inserts: what was put in elsewhere, and why; nothing when refused.
        collectives: sums over the ranks that were put in for what a model uses as the whole, and reads of neighbouring
            tokens; none when refused.
        notes: what was set for the dry run, and what was taken for granted.
        target: attention's time, bytes between GPUs and memory on the machine that training will run on: of
            `Sharding(speeds=…)`, of the mesh's GPUs, or of H200s. None when refused.
    """

    sites: tuple[SiteReport, ...]
    refusals: tuple[Refusal, ...]
    ops_before: Counter[str]
    ops_after: Counter[str]
    before: tuple[str, ...]
    after: tuple[str, ...]
    inserts: tuple[str, ...] = ()
    collectives: tuple[Collective, ...] = ()
    notes: tuple[str, ...] = ()
    target: Target | None = None

    @property
    def ok(self) -> bool:
        """True when the graph is rewritten."""
        return not self.refusals

    @property
    def counts(self) -> str:
        """How many sites and refusals there are, in words."""
        return f"{_count(self.sites, 'attention site')}, {_count(self.refusals, 'refusal')}"

    @property
    def diff(self) -> str:
        """Normalised unified diff of the graph, repeated layers folded."""
        return graph_diff(list(self.before), list(self.after))

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON: `ok`, `sites`, `refusals`, `collectives`, `inserts`, `notes`,
        `ops_before`, `ops_after` and `target`. Inner keys are these classes' fields. Keys stay; new ones may come."""
        return page.as_dict(self)

    def as_html(self, title: str = "cp_rewrite", plan: Plan | None = None) -> str:
        """One page that needs nothing beside it: sites, refusals with their source lines, the target machine, the
        picture of a plan (`cp.plan`), the diff of the graph."""
        return page.as_html(self, title, plan)

    def __str__(self) -> str:
        reads = [x.bytes for x in self.collectives if x.op == _READ]
        states = [x.bytes for x in self.collectives if x.op == _STATES]
        sums = [x.bytes for x in self.collectives if x.op not in (_READ, _STATES) and x.bytes]
        travels = f", {_count(sums, 'sum')} over ranks of {sum(sums):,} bytes" if sums else ""
        travels += f", {_count(reads, 'read')} of neighbours of {sum(reads):,} bytes" if reads else ""
        travels += f", {_count(states, 'state')} of {sum(states):,} bytes" if states else ""
        lines = [f"{self.counts}{travels}"]
        lines += _folded([str(site) for site in self.sites])
        lines += _folded([str(collective) for collective in self.collectives])
        lines += _folded([f"inserted  {insert}" for insert in self.inserts])
        lines += [f"refused   {refusal}" for refusal in folded(self.refusals)]
        lines += [f"what to do {pages_of(self.refusals)}"] if self.refusals else []
        lines += [f"note      {note}" for note in self.notes]
        lines += [] if self.target is None else [str(self.target)]
        changed = sorted(op for op in self.ops_before | self.ops_after if self.ops_before[op] != self.ops_after[op])
        lines += [f"ops       {op}: {self.ops_before[op]} -> {self.ops_after[op]}" for op in changed]
        return "\n".join(lines)


def explain(
    model: nn.Module | Callable[..., Any],
    sharding: Sharding,
    *,
    shift_labels: bool = False,
    label_arg: str = "labels",
) -> Callable[..., Report]:
    """Capture a model and run the passes on it; nothing of the model runs.

        report = cp.explain(model, sharding)(**batch)

    The returned function takes the global batch by keyword and returns a Report. Sharding may hold a plain world size.
    `shift_labels` and `label_arg` as in `Sharding.shard`. What tells documents apart need not be an argument of the
    model. A model may be on `meta`: masks that its buffers hold are then not known.

    Raises:
        TypeError: no model or no Sharding. The returned function raises what `Sharding.shard` does, and what Dynamo
            does where it can't capture the whole model.
    """
    if not callable(model):  # pyright: ignore[reportUnnecessaryComparison]
        raise TypeError(f"model must be a module or a function, got {model!r}")
    sharding = replace(require_sharding(sharding), check_batches=False, rows="same")  # one rank may ask alone

    def dry_run(**batch: Any) -> Report:
        found: list[Report] = []

        def capture_backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            found.append(_report(capture(gm, sharding, active_plan(sharding)), model))
            # Torch keeps nothing of it: guards of a graph that nobody runs take long to make, and count as a compile.
            raise _Captured

        unread = untaken_args(model, sharding.packing, batch)
        with sharding.shard(batch, shift_labels=shift_labels, label_arg=label_arg, drop=unread) as local:
            try:
                # Of symbolic sizes torch's cache of fake results remembers little, and hashing them takes long.
                with torch._dynamo.config.patch(fake_tensor_cache_enabled=False), weights_on_cpu(model):
                    torch.compile(model, backend=capture_backend, fullgraph=True)(**local)
            except _Captured:
                return found[0]
        raise RuntimeError("the model has no graph to explain: nothing in it is a tensor computation")

    return dry_run


class _Captured(BaseException):
    """No Exception: no handler of Dynamo's, or of a module around the graph, looks at it."""


def _report(state: passes.State, model: Any) -> Report:
    before, ops_before = graph_lines(state.graph_module), _op_counts(state.graph_module)
    where = {id(node): source_line(node) for node in state.graph_module.graph.nodes}
    rows = state.plan.plan.local_size * len(state.plan.plan.rows)
    target = facts_of(state)
    facts = target[1] if target else None
    needs = needs_of(model, state.graph_module, rows, facts) if isinstance(model, nn.Module) else None
    state = passes.run_passes(replace(state, target=facts))
    decisions = {id(decision.site): decision for decision in state.decisions}
    sites: list[SiteReport] = []
    for site in state.sites:
        decision = None if state.refusals else decisions.get(id(site))
        line = where.get(id(site.node)) or source_line(site.node)
        mask = f"{site.mask}{' (assumed)' if site.assumed else ''}"
        chosen = (None, None, ()) if decision is None else (decision.exchange_name, decision.kernel, decision.why)
        sites.append(SiteReport(line, mask, *chosen))
    inserts = [i for i in state.locality.inserts if not state.refusals and not _is_of_sums(i.emit)]
    found = [f"{where.get(id(insert.node)) or source_line(insert.node)}\n          {insert.why}" for insert in inserts]
    ops_after, after = _op_counts(state.graph_module), graph_lines(state.graph_module)
    texts = tuple(before), tuple(after), tuple(found)
    collectives = [
        *_collectives(state.graph_module),
        *(() if state.refusals else (*_reads(state, where), *_states(state, where))),
    ]
    notes = (_KERNELS.format(target[0]),) if target and target[1].capability and sites else ()
    forecast = None if state.refusals else _forecast(state, needs, rows)
    return Report(tuple(sites), state.refusals, ops_before, ops_after, *texts, tuple(collectives), notes, forecast)


def _forecast(state: passes.State, needs: Needs | None, rows: int) -> Target:
    """What the rewritten graph takes: of its logits, all that it still gives or has."""
    if needs is None or state.sharding.tile is None:
        return target_of(state, needs)
    has, returns = logits_of(needs, state.graph_module, rows)
    return target_of(state, replace(needs, returned=returns), tiled=not has)


_KERNELS = "kernels are those of an {} in bfloat16, where FlashAttention 4 is installed (pip install 'cp_rewrite[fa4]')"


def _is_of_sums(emit: Any) -> bool:
    """True if sums over ranks are put in, which are listed as collectives."""
    return isinstance(emit, Converted) and any(isinstance(each, OfSums) for each in emit.conversions)


_READ, _STATES = "neighbour_rows", "state summaries"
_SUMS: dict[str, int] = {
    "cp_rewrite.sum_over_ranks": 1,
    "cp_rewrite.sum_gradient_over_ranks": 1,
    "cp_rewrite.largest_over_ranks": 2,
    "cp_rewrite.max_over_ranks": 1,
    "cp_rewrite.rows_of_ranks": 1,
    "cp_rewrite.share_out_gradient": 0,
}
"""Ops that make parts whole -> how often their operand's bytes travel."""


def _collectives(gm: fx.GraphModule) -> Iterator[Collective]:
    for node in (node for body in graph_modules(gm) for node in body.graph.nodes if node.op == "call_function"):
        times = _SUMS.get(target_name(node.target))
        if times is not None and "cp_rewrite" in node.meta:
            value: Any = node.args[0].meta["example_value"]  # type: ignore[union-attr]
            count = hint(value.numel()) if isinstance(value.numel(), SymInt) else value.numel()
            size = times * value.element_size() * int(count or 0)
            yield Collective(source_line(node), node.meta["cp_rewrite"], target_name(node.target).split(".")[-1], size)


def _reads(state: passes.State, where: Mapping[int, str]) -> Iterator[Collective]:
    for read in state.locality.reads:
        if read.read is None:  # nothing travels
            continue
        value: Any = read.source.meta["example_value"]
        count = hint(value.numel()) // (state.plan.plan.local_size * len(state.plan.plan.rows))
        size = value.element_size() * count * state.plan.most_received(read.read)
        yield Collective(where.get(id(read.node)) or source_line(read.node), read.why, _READ, size)


def _states(state: passes.State, where: Mapping[int, str]) -> Iterator[Collective]:
    for lowered in state.locality.lowered:
        for run in (step.run for step in lowered.steps if isinstance(step.run, OnPieces)):
            size = int(run.bytes * state.plan.most_received(run.states))
            yield Collective(where.get(id(lowered.node)) or source_line(lowered.node), run.why, _STATES, size)


def _op_counts(gm: fx.GraphModule) -> Counter[str]:
    counts: Counter[str] = Counter()
    for body in graph_modules(gm):
        counts.update(target_name(node.target) for node in body.graph.nodes if node.op.startswith("call"))
    return counts


def _count(things: Sequence[Any], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _folded(entries: list[str]) -> list[str]:
    """Equal entries, one per layer, as one line with a count."""
    return [text + (f"  (× {count})" if count > 1 else "") for text, count in Counter(entries).items()]
