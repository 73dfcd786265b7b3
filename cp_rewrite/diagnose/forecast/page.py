"""A report as a dict for programs, and as one page of HTML for people."""

from __future__ import annotations

import base64
import html
import io
import linecache
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cp_rewrite.planning.plan import Plan
from cp_rewrite.refusal import pages_of

if TYPE_CHECKING:  # explain.py imports this file
    from cp_rewrite.diagnose.explain import Report


def as_dict(report: Report) -> dict[str, Any]:
    """What `python -m cp_rewrite explain --json` prints; the keys are those of `Report` and stay."""
    target = report.target
    return {
        "ok": report.ok,
        "sites": [asdict(site) for site in report.sites],
        "refusals": [
            {
                "reason": r.reason.name,
                "where": r.where,
                "detail": r.detail,
                "advice": r.reason.value,
                "see": pages_of([r]),
            }
            for r in report.refusals
        ],
        "collectives": [asdict(collective) for collective in report.collectives],
        "inserts": list(report.inserts),
        "notes": list(report.notes),
        "ops_before": dict(sorted(report.ops_before.items())),
        "ops_after": dict(sorted(report.ops_after.items())),
        "target": None if target is None else target.as_dict(),
    }


def as_html(report: Report, title: str, plan: Plan | None = None) -> str:
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
