"""A captured graph: its capture, regions, sources, reads and writes, and its text."""
