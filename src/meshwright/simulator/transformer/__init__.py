"""Describes a transformer's training step by formulas: what its kernels do, what they keep, what devices exchange."""
