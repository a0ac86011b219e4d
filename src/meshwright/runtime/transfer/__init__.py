"""Moves arrays between meshes, in one process and between processes."""
