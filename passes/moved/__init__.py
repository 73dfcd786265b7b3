"""Tokens in other places, and rows of fewer tokens, as the rewrite leaves them in the graph."""
