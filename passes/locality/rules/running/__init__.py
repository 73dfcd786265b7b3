"""Operations that run over the tokens of the row: running sums, and what is made of them."""
