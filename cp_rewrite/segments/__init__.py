"""A proven graph, cut between the blocks of its model: equal segments are compiled once, and run in order."""
