"""Regions that run tile by tile: their bodies as ATen graphs, and the op in their place."""
