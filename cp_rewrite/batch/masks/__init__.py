"""Masks that come in as arguments of a batch."""
