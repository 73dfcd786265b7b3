"""Around a rewritten graph: counts of its compile, checks of each call's arguments and marks of its results."""
