"""What each ATen op does to symbolic tensors."""
