"""The rewrite. Only what stands here changes a graph that was captured.

rewrite_sites   the pass: all changes, in order
plan_inputs     the plan's tensors as inputs of the graph and of its regions
read_neighbours, keep_rows   shifts of tokens, and tensors of fewer tokens than the row
inserts         what is put between nodes and their operands
lower           nodes taken apart, some of their ops changed
positions       positions of the shard made global
attention       exchange and packed attention in the place of a site
copy_nodes      the same where something narrower than keys and values travels
tiles/          the second pass: regions that are wide inside run tile by tile
erase           what nothing reads any more
"""
