"""Ops that read rows of neighbouring tokens."""
