"""Priced problems as plain arrays, which know neither graph nor JAX."""
