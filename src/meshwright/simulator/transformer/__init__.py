"""Describes a transformer's training step by formulas: its kernels, the tensors that they keep, the exchanges between
devices."""
