"""Attention that is joined with other things in one node, taken apart."""
