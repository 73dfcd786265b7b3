"""Find attention nodes, and bring every spelling into one normal form."""
