"""Memory of the peers' GPUs: symmetric memory, and kernels that write into it."""
