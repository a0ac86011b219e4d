"""Reads Alpa's dumps of its own plans."""
