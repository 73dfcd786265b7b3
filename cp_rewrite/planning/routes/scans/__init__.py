"""The tables of operations that run over the tokens of a row."""
