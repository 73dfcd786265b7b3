"""The active plan: the batch in flight, and the tensors that a rewritten graph reads as its extra inputs."""
