"""Parallelised functions, their state, batches and checkpoints."""
