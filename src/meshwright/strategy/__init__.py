"""Strategies: how an operation can be split, and the cost of resharding."""
