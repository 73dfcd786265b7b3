"""Exchange where rows are narrowest: of what keys and values are computed from, token by token.

read_way    which nodes on the way to keys and values could run on the rows of other ranks as well
find_cut    the cheapest tensors to exchange on that way
move_exchanges   the pass: a cut for each site where it pays
copy_nodes  the rewrite: exchanged rows, and the nodes behind the cut once more
"""
