"""Layouts: which rank owns which tokens of a row, and in which order."""
