"""Exchange where rows are narrowest: of what keys and values are computed from, token by token.

move_exchanges   the pass: a cut for each site where it pays
find_cut         the cheapest tensors to exchange on the way to keys and values
read_way         which nodes on that way could run on the rows of other ranks as well
"""
