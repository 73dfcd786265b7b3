"""A graph from Dynamo, copied, and brought into nodes that matching and rules know.

capture        the copy, and the `State` that passes hand on; sizes that a region is given twice, given once
multihead      `nn.MultiheadAttention` as projections around attention
flash_attn     flash-attn's functions as the operators that they call
whole_writes   writes by a mask, and rows put in the place of some tokens, as choices token by token
place_writes   writes at places of the row as choices token by token
picked_sums    sums of tokens that a mask picks as sums over all tokens
late_picks     ops on picked tokens, run on all of them
part_moves     what moves tokens and does more at once, in parts
join_chunks    loops over chunks of tokens as one run over all of them
join_regions   the same where a checkpoint works on each chunk
"""
