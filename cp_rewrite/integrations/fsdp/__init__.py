"""Weights that FSDP2 shards: the graph of a model without weights, run block by block."""
