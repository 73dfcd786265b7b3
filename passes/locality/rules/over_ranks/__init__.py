"""Ops over tokens, run over the tokens of all ranks, or without the rows that fill a rank up."""
