"""Frozen values that passes hand on to one another."""
