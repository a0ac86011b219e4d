"""Checkpoints of a training state: what is written, how all processes agree on it, and how it is read again."""
