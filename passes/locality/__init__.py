"""Prove that nothing but attention mixes tokens."""
