"""The sweep's part of docs/generated/models.md, from its outcomes and back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from .trial import LIMIT, Outcome

DOCS = Path(__file__).parent.parent.parent / "docs" / "generated" / "models.md"
TITLE = "## All text models of `transformers`"
VERDICTS = ("right", "refused", "torch", "different", "hung", "crashed", "unbuilt", "")
"""From the best to none at all."""
KINDS = {
    "causal": "causal language models",
    "masked": "masked language models",
    "seq2seq": "sequence to sequence",
    "encoder": "models without a head",
    "tokens": "classification of tokens",
    "sequence": "classification of sequences",
    "spans": "with spans of images, or prefixes",
    "images": "with images",
}


def best(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The best outcome of each class; of equal ones the first."""
    found: dict[str, Outcome] = {}
    for outcome in outcomes:
        known = found.setdefault(outcome.name, outcome)
        if VERDICTS.index(outcome.verdict) < VERDICTS.index(known.verdict):
            found[outcome.name] = outcome
    return [*found.values()]


def section(outcomes: Iterable[Outcome], versions: str) -> str:
    """The docs' text from TITLE on."""
    tried = sorted(best(outcomes), key=lambda o: ([*KINDS].index(o.head), o.name.lower()))
    shown = [outcome for outcome in tried if outcome.verdict != "unbuilt"]
    unbuilt = [f"`{outcome.name}`" for outcome in tried if outcome.verdict == "unbuilt"]
    counts = Counter((outcome.head, outcome.verdict) for outcome in shown)
    columns = [verdict for verdict in VERDICTS[:6] if any(counts[head, verdict] for head in KINDS)]
    lines = [
        TITLE,
        "",
        "Written by `python -m tests.sweep`, which tries every class of `transformers`' auto mappings that reads text",
        "alone, and some that read images too, which get images, or tokens marked as theirs: small and with random",
        "weights, in processes of its own, with a time limit, on 2 ranks against one",
        "process. *Right* is as above; where fp32 itself is further than that from fp64 on one process, as for biases",
        "of keys, whose gradients are 0 in exact arithmetic, the limit is four times that, and what is beyond it is",
        "compared in fp64. *Torch* means that torch.compile can't capture the plain model as one graph.",
        "`make test-slow` tries some classes again, drawn each day, and fails where one that was right is not, or one",
        f"differs, crashes or hangs. {versions}.",
        "",
        "*Logits*: the loss was computed from what the model returns, as its own is refused. *Eval*: the model was in",
        "`eval()`, as it drops layers or draws experts in training.",
        "",
        "| | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
        *(
            f"| {words} | " + " | ".join(str(counts[head, verdict]) for verdict in columns) + " |"
            for head, words in KINDS.items()
        ),
        "",
        "| class | attention | masks proven | outcome | loss | gradient | layers |",
        "|---|---|---|---|---|---|---|",
        *map(row, shown),
        "",
        "Small configs have every kind of layer that the class tells apart, and windows, chunks and blocks are short.",
        f"Right without a part that their file has: {', '.join(filter(None, map(without, shown)))}.",
        "",
        f"The rules for small configs do not fit, or the batch has not what the model needs: {', '.join(unbuilt)}.",
    ]
    return "\n".join(lines) + "\n"


def row(outcome: Outcome) -> str:
    how = [word for word, holds in (("logits", not outcome.own_loss), ("eval", not outcome.training)) if holds]
    if outcome.head == "encoder":
        how = [word for word in how if word != "logits"]
    right = outcome.verdict == "right"
    verdict = ", ".join([outcome.verdict, *how]) if right else f"{outcome.verdict}: {words(outcome)}"
    noise = f" (fp32 {outcome.noise:.0e})" if outcome.gradient > LIMIT else " in fp64" if outcome.fp64 else ""
    numbers = f"{outcome.loss:.0e} | {outcome.gradient:.0e}{noise}" if right else "– | –"
    masks = ", ".join(outcome.masks) or "–"
    layers = ", ".join(outcome.layers) or "alike"
    return f"| {outcome.name} | {outcome.attention or '–'} | {masks} | {verdict} | {numbers} | {layers} |"


def without(outcome: Outcome) -> str:
    absent = outcome.absent if outcome.verdict == "right" else []
    return f"`{outcome.name}` ({', '.join(absent)})" if absent else ""


def words(outcome: Outcome) -> str:
    """The first reason, without places in files and names of nodes."""
    first = outcome.why[0].splitlines()[0] if outcome.why else ""
    if outcome.verdict == "refused":
        reason, place, detail = ([*first.removeprefix("late: ").split(": ", 2), "", ""])[:3]
        code = re.search(r"`(.*?)`", place)
        where = f", at `{code[1][:60]}`" if code and reason != "TOKEN_COUNT" else ""
        first = f"{reason}: {detail}{where}"
    return first.replace("|", "\\|")[:240]


def verdicts(text: str) -> dict[str, str]:
    """Class -> verdict, as the docs have it."""
    found: dict[str, str] = {}
    for line in text.partition(TITLE)[2].splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        if len(cells) >= 8 and cells[1] not in ("class", "---"):
            found[cells[1]] = re.split(r"[,:]", cells[4])[0]
    return found


def write(outcomes: Iterable[Outcome], versions: str) -> None:
    """Put the section into the docs."""
    before = DOCS.read_text().partition(TITLE)[0].rstrip()
    DOCS.write_text(f"{before}\n\n{section(outcomes, versions)}")
