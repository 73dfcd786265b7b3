"""Tests run on short rows what users run on long ones: layouts are searched for as those of long rows are."""

from cp_rewrite.planning.layouts import balanced

AS_SHORT = {name: getattr(balanced, name) for name in ("SIMPLE", "ONCE", "TWICE")}
"""The tokens of a rank up to which users' rows are planned as short ones."""
balanced.SIMPLE = balanced.ONCE = balanced.TWICE = 0
