"""Describes a transformer's training step by formulas: its kernels, the tensors they keep, and the exchanges."""
