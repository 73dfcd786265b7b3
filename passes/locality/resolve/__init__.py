"""Ops that are not the same on a shard are made so."""
