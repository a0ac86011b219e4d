"""Explains a plan: its decisions in words, their reasons, and the alternatives; only a fresh record needs JAX."""
