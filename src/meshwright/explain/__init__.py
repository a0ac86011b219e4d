"""Explain: what a plan decided, in words; why; and what else was possible. Needs no JAX but to make a fresh record."""
