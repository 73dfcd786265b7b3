"""Experts of a mixture that ranks share: who owns which, and how tokens reach them and come back."""
