"""Tokens that an op picks by their places in the whole row: each rank gives those that it has, and ranks add up."""
