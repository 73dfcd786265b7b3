"""Which parts of a rewritten graph may run over some of a rank's rows at a time, and which of them are worth it.

rowwise        what each node is for the rows of a rank, by the rules of `passes/locality`: tiles are like ranks
find_region    from a wide tensor to where few bytes a row cross
"""
