"""What is known of a tensor."""
