"""Tests run on short rows what users run on long ones: layouts are searched for as those of long rows are."""

from cp_rewrite.planning.layouts import balanced

AS_SHORT = balanced.SIMPLE, balanced.ONCE
"""The tokens of a rank up to which users' rows are planned as short ones."""
balanced.SIMPLE = balanced.ONCE = 0
