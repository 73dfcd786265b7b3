"""Ops over recurrent states: linear attention and state-space layers, on whole rows and on pieces of them."""
