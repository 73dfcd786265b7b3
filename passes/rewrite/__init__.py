"""The rewrite. Only what stands here changes a graph that was captured.

rewrite_sites   the pass: all changes, in order; what is put between nodes and operands; what nothing reads any more
inputs          the plan's tensors as inputs of the graph and of its regions; what the graph writes, read off a copy by
                backwards that compute it again
edits           nodes taken apart, some of their ops changed; positions of the shard made global; shifts of tokens, and
                tensors of fewer tokens than the row
attention       exchange and packed attention in the place of a site, at keys and values or at something narrower
tile_rows       the second pass: regions that are wide inside run tile by tile; wide outputs beside a loss are left out
"""
