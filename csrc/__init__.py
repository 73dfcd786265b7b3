"""CUDA C++ sources, compiled at first use (see cp_rewrite.kernels.cuda)."""
