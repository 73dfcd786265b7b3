"""A dry run: what would be rewritten, what not and why, and the graph before and after. No GPU, no process group.

report_as_dict, report_as_html    a report for programs, and as one page for people
weights_on_cpu                    a model on `meta`, as rules take it: they are made for tensors on a CPU or a GPU
Report                            the findings
explain                           the run
"""

from __future__ import annotations

import base64
import html
import io
import linecache
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx
from torch import SymInt, Tensor, nn

from cp_rewrite import passes
from cp_rewrite.batch.active import active_plan
from cp_rewrite.packing import CuSeqlens, packing_args, untaken_args, whole_args
from cp_rewrite.passes.capture.capture import capture, copied
from cp_rewrite.passes.graph.diff import graph_diff, graph_lines, target_name
from cp_rewrite.passes.graph.nodes import graph_modules
from cp_rewrite.passes.locality.rules.states import OnPieces
from cp_rewrite.passes.values.edits import Converted, OfSums
from cp_rewrite.planning.plan import Plan
from cp_rewrite.refusal import Refusal, folded, pages_of, source_line
from cp_rewrite.segments.blocks import ReadOnce
from cp_rewrite.sharding import Sharding, require_sharding
from cp_rewrite.torch_internals import hint

from .target import Target, facts_of, needs_of, target_of


def report_as_dict(report: Report) -> dict[str, Any]:
    """The report as `python -m cp_rewrite explain --json` prints it; the keys are those of `Report` and stay."""
    target = report.target
    return {
        "ok": report.ok,
        "sites": [asdict(site) for site in report.sites],
        "refusals": [_as_dict(r) for r in report.refusals],
        "lengths": {n: [_as_dict(r) for r in found] for n, found in report.lengths.items()},
        "collectives": [asdict(collective) for collective in report.collectives],
        "inserts": list(report.inserts),
        "notes": list(report.notes),
        "ops_before": dict(sorted(report.ops_before.items())),
        "ops_after": dict(sorted(report.ops_after.items())),
        "target": None if target is None else target.as_dict(),
    }


def _as_dict(r: Refusal) -> dict[str, Any]:
    return {
        "reason": r.reason.name,
        "where": r.where,
        "detail": r.detail,
        "advice": r.reason.value,
        "see": pages_of([r]),
    }


def report_as_html(report: Report, title: str, plan: Plan | None = None) -> str:
    """A page that needs nothing beside it: sites, refusals with their source, the plan's picture, the graph's diff."""
    state = report.counts
    parts = [_section("Refusals", _refusals(report))] if report.refusals else []
    parts.append(_section("Attention", _table(("where", "mask", "exchange", "kernel", "why"), _sites(report))))
    if report.target is not None:
        parts.append(_section("On the target machine", _pre(str(report.target))))
    if report.collectives:
        rows = [(c.where, c.why, c.op, f"{c.bytes:,} bytes") for c in report.collectives]
        parts.append(_section("Sums over ranks and reads of neighbours", _table(("where", "why", "op", "bytes"), rows)))
    if report.notes or report.inserts:
        parts.append(_section("Notes", _pre("\n".join((*report.notes, *report.inserts)))))
    if plan is not None:
        parts.append(_section("The batch's plan", _picture(plan)))
    parts.append(_section("The graph", _diff(report)))
    return _PAGE.format(title=html.escape(title), state=html.escape(state), style=_STYLE, body="\n".join(parts))


def _sites(report: Report) -> list[tuple[str, ...]]:
    return [(s.where, s.mask, s.exchange or "–", s.kernel or "–", "\n".join(s.why)) for s in report.sites]


def _refusals(report: Report) -> str:
    found: list[str] = []
    for r in report.refusals:
        texts = "".join(f"<p>{html.escape(text)}</p>" for text in (r.detail, r.reason.value, r.where))
        found.append(f"<h3>{r.reason.name}</h3>{texts}{_source(r.where)}<p>What to do: {pages_of([r])}</p>")
    return "\n".join(found)


def _source(where: str) -> str:
    """The lines around `file.py:12, …`, that line marked; nothing where the file is not there."""
    found = re.match(r"(.+?):(\d+)", where)
    if found is None:
        return ""
    line = int(found[2])
    lines = [(n, linecache.getline(found[1], n)) for n in range(max(1, line - 4), line + 5)]
    texts = {n: f"{n:5d}  {html.escape(text)}" for n, text in lines if text}
    marked = "".join(f"<b>{text}</b>" if n == line else text for n, text in texts.items())
    return f"<pre>{marked}</pre>" if marked else ""


def _picture(plan: Plan) -> str:
    """The plan drawn, where matplotlib is there, and as text."""
    data = io.BytesIO()
    try:
        plan.plot(data)
    except ImportError:
        return _pre(str(plan))
    picture = base64.b64encode(data.getvalue()).decode()
    return f'<img alt="the plan of the batch" src="data:image/png;base64,{picture}">{_pre(str(plan))}'


def _diff(report: Report) -> str:
    """The graph's diff, added and removed lines coloured."""
    if not report.diff:
        return "<p>The graph is left as it is.</p>"
    kinds = {"+": "added", "-": "removed", "@": "at"}
    lines = [(kinds.get(line[:1], "same"), html.escape(line)) for line in report.diff.splitlines()]
    return "<pre>" + "\n".join(f'<span class="{kind}">{line}</span>' for kind, line in lines) + "</pre>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Equal rows, one per layer, as one with a count."""
    counts: dict[tuple[str, ...], int] = {}
    for row in rows:
        counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in (str(count), *row)) for row, count in counts.items()]
    names = "".join(f"<th>{html.escape(name)}</th>" for name in ("×", *head))
    return f"<table><tr>{names}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _section(title: str, body: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n{body}"


def _pre(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; font-size: 13px } img { max-width: 100% }
table { border-collapse: collapse; font-size: 13px } td, th { border: 1px solid #ddd; padding: .3rem .5rem }
td { vertical-align: top; white-space: pre-wrap; word-break: break-word } th { text-align: left; background: #eee }
.added { color: #06670f } .removed { color: #a31515 } .at { color: #666 }
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head>
<body><h1>{title}</h1><p>{state}</p>
{body}
</body></html>
"""


@contextmanager
def weights_on_cpu(model: Any) -> Generator[None]:
    """Inside, a module's weights and buffers on `meta` are tensors on the CPU, whose memory nothing writes; what is
    shared stays shared. What buffers hold is not known: masks are not read off them."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    places = [held for module in modules for held in (module._parameters, module._buffers)]
    before = [(held, name, x) for held in places for name, x in held.items() if isinstance(x, Tensor) and x.is_meta]
    made: dict[int, Tensor] = {}
    for held, name, x in before:
        if id(x) not in made:
            made[id(x)] = _like(x)
        held[name] = made[id(x)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for held, name, x in before:
            held[name] = x  # type: ignore[assignment]


def _like(x: Tensor) -> Tensor:
    if isinstance(x, nn.Parameter):
        return nn.Parameter(torch.empty_like(x, device="cpu"), x.requires_grad)
    known = torch.empty_like(x, device="cpu")
    known._cp_rewrite_unknown = True  # type: ignore[attr-defined]
    return known


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
    """The findings of `explain`. `str()` is the text to read.

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
        lengths: tokens of a row -> every reason against it, of the lengths that were asked for.
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
    lengths: Mapping[int, tuple[Refusal, ...]] = field(default_factory=dict[int, tuple[Refusal, ...]])

    @property
    def ok(self) -> bool:
        """True when the graph is rewritten, of rows of every length that was asked for."""
        return not self.refusals and not any(self.lengths.values())

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
        return report_as_dict(self)

    def as_html(self, title: str = "cp_rewrite", plan: Plan | None = None) -> str:
        """One page that needs nothing beside it: sites, refusals with their source lines, the target machine, the
        picture of a plan (`cp.plan`), the diff of the graph."""
        return report_as_html(self, title, plan)

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
        wrong = [n for n, found in self.lengths.items() if found]
        right = [n for n in self.lengths if n not in wrong]
        lines += [f"lengths   rows of {', '.join(map(str, right))} tokens are right"] if right else []
        for n in wrong:
            lines += [f"lengths   rows of {n} tokens: refused   {refusal}" for refusal in folded(self.lengths[n])]
        lines += ["          pad rows to a length that is right"] if wrong and right else []
        against = [*self.refusals, *(refusal for found in self.lengths.values() for refusal in found)]
        lines += [f"what to do {pages_of(against)}"] if against else []
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
    lengths: Sequence[int] = (),
) -> Callable[..., Report]:
    """Capture a model and run the passes on it; nothing of the model runs.

        report = cp.explain(model, sharding)(**batch)
        report = cp.explain(model, sharding, lengths=[500, 512, 1000])(**batch)

    The returned function takes the global batch by keyword and returns a Report. Sharding may hold a plain world size.
    `shift_labels` and `label_arg` as in `Sharding.shard`. What tells documents apart need not be an argument of the
    model. A model may be on `meta`: masks that its buffers hold are then not known.

    Args:
        lengths: numbers of tokens of a row, up to the batch's. A model that decides by the number of tokens has another
            graph for some of them, which training would meet at a later batch: each is tried on the batch's first
            tokens, and the report says which are refused.

    Raises:
        TypeError: no model or no Sharding. The returned function raises what `Sharding.shard` does, and what Dynamo
            does where it can't capture the whole model; ValueError for `lengths` that the batch does not have.
    """
    if not callable(model):  # pyright: ignore[reportUnnecessaryComparison]
        raise TypeError(f"model must be a module or a function, got {model!r}")
    sharding = replace(require_sharding(sharding), check_batches=False, rows="same")  # one rank may ask alone

    def one(batch: Mapping[str, Any]) -> Report:
        found: list[Report] = []

        def capture_backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            with blocks.trial() as once:
                report = _report(capture(gm, sharding, active_plan(sharding)), model, once)
                blocks.accept(report.refusals)
            found.append(report)
            # Torch keeps nothing of it: guards of a graph that nobody runs take long to make, and count as a compile.
            raise _Captured

        unread, blocks = untaken_args(model, sharding.packing, batch), ReadOnce(model)
        with sharding.shard(batch, shift_labels=shift_labels, label_arg=label_arg, drop=unread) as local:
            try:
                # Of symbolic sizes torch's cache of fake results remembers little, and hashing them takes long.
                with torch._dynamo.config.patch(fake_tensor_cache_enabled=False), weights_on_cpu(model):
                    blocks.call(lambda: torch.compile(model, backend=capture_backend, fullgraph=True)(**local))
            except _Captured:
                return found[0]
            finally:
                blocks.end()
        raise RuntimeError("the model has no graph to explain: nothing in it is a tensor computation")

    def dry_run(**batch: Any) -> Report:
        cut = {n: _first_tokens(batch, n, sharding) for n in lengths}
        report, found = one(batch), dict[int, tuple[Refusal, ...]]()
        for n, part in cut.items():
            try:
                found[n] = one(part).refusals
            except Exception as error:
                error.add_note(f"in a row of {n} tokens, of explain's lengths")
                raise
        return replace(report, lengths=found)

    return dry_run


def _first_tokens(batch: Mapping[str, Any], tokens: int, sharding: Sharding) -> dict[str, Any]:
    """A batch of the first tokens of each of its rows."""
    whole, names = whole_args(sharding.packing), packing_args(sharding.packing)
    dims = {**dict.fromkeys((name for name in names if name not in whole), -1), **sharding.tokens}
    given = {name: batch[name] for name in dims if isinstance(batch.get(name), Tensor)}
    longest = min((x.shape[dims[name]] for name, x in given.items()), default=0)
    if not isinstance(tokens, int) or not 0 < tokens <= longest:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"lengths must be whole numbers from 1 to the batch's {longest} tokens, got {tokens!r}")
    cut = {name: x.narrow(dims[name], 0, tokens).contiguous() for name, x in given.items()}
    offsets = {name: batch[name] for name in whole if isinstance(batch.get(name), Tensor)}
    if offsets and not isinstance(sharding.packing, CuSeqlens):
        raise ValueError(f"lengths can't be tried with {sharding.packing!r}, whose {[*offsets]} are not of tokens")
    rows = max((x.shape[0] for name, x in cut.items() if dims[name] % x.ndim), default=1)
    if offsets and rows > 1:
        raise ValueError(f"lengths can't be tried with offsets of {rows} rows: give a batch of one")
    return {**batch, **cut, **{name: x.clamp(max=tokens).unique_consecutive() for name, x in offsets.items()}}


class _Captured(BaseException):
    """Raised to end a call whose graph was captured. It is no Exception: no handler of Dynamo's, or of a module around
    the graph, catches it."""


def _report(state: passes.State, model: Any, once: bool) -> Report:
    """`once`: blocks were read once for all; in the report they stand as often as they run."""
    gm, origin = _plain(state.graph_module) if once else (state.graph_module, dict[fx.Node, fx.Node]())
    before, ops_before = graph_lines(gm), _op_counts(gm)
    where = {id(node): source_line(node) for node in state.graph_module.graph.nodes}
    length = next((hint(found.tokens) for found in state.tokens.inputs), None) or state.plan.plan.local_size
    rows = length * len(state.plan.plan.rows)  # in the graph before it has a rank's sizes
    target = facts_of(state)
    facts = target[1] if target else None
    counted = needs_of(model, gm, rows, facts) if isinstance(model, nn.Module) else None
    state = passes.run_passes(replace(state, target=facts))
    # Of what tiles may spare, all that the rewritten graph still has.
    tiled = counted is not None and state.sharding.tile is not None and not state.refusals
    needs = counted and (counted.after(state.graph_module, origin) if tiled else counted.needs)
    if once and not state.refusals:
        state = passes.instantiated(state)
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
    forecast = None if state.refusals else target_of(state, needs)
    return Report(tuple(sites), state.refusals, ops_before, ops_after, *texts, tuple(collectives), notes, forecast)


def _plain(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy of a graph in which each block stands as often as it runs; each of its nodes -> the graph's own."""
    copies: dict[fx.Node, fx.Node] = {}
    plain = copied(gm, copies)
    origin = {copy: node for node, copy in copies.items()}
    return plain, origin | {node: origin[inside] for node, inside in passes.instantiate(plain).items()}


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
