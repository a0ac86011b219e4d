"""Strategies: how an operation can be split, and what moving between shardings costs."""
