"""Shifts, rolls and convolutions over tokens: which entries of the whole row they read."""
