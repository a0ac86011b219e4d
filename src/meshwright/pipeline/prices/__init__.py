"""Prices layers and stages on submeshes."""
