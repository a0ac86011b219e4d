"""State, batches and checkpoints of a training run."""
