"""The page of memory shows the longest rows that the forecast gives now."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "bench" / "longest_rows.py"


@pytest.mark.slow
def test_the_page_shows_what_the_forecast_gives() -> None:
    names = runpy.run_path(str(SCRIPT))
    page = names["PAGE"].read_text()
    for model in names["models"]():
        assert names["table"](model) in page, f"run examples/bench/longest_rows.py: {model.name} changed"
