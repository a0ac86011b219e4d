"""The planned program, built operation by operation."""
