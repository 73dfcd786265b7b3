"""Regions of a graph that run over some of a rank's rows at a time."""
