"""Locality rules, op by op. `table` shows all of them; the functions it names stand beside it."""
