"""Attention whose keys and values each rank computes itself, of narrower rows of tokens that were exchanged."""
