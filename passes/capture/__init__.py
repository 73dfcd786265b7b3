"""A graph from Dynamo, copied, and brought into nodes that matching and rules know.

capture    the copy, and the `State` that passes hand on; sizes that a region is given twice, given once
attention  `nn.MultiheadAttention` as projections around attention, flash-attn's functions as the operators that they
           call
scatters   writes by a mask or at places of the row as choices token by token
moves      what moves tokens and does more at once, in parts
picks      sums of tokens that a mask picks as sums over all tokens; ops on picked tokens, run on all of them
chunks     loops over chunks of tokens as one run over all of them, also where a checkpoint works on each chunk
"""
