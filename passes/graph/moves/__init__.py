"""Nodes that move tokens, or write at places among them, as nodes that the rules know."""
