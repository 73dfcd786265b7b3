"""What the trainers of `transformers` and TRL share: their forward, their inputs, their accelerator."""
