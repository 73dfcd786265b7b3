"""Sums of what is no token row, over ranks."""
