"""What a training step does with what the ranks computed: losses, gradients, weights."""
