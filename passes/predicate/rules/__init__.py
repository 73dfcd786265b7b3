"""Effects of ATen ops on symbolic tensors."""
