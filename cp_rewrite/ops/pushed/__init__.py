"""Attention whose rows travel by `push` while the kernel works: in two parts of rows, or in stages of heads."""
