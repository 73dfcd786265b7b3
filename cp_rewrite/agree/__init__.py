"""Ranks that agree: texts compared turn by turn, and a heartbeat that names who died."""
