"""FlashAttention: the libraries, their variable-length calls and what is read inside of them."""
