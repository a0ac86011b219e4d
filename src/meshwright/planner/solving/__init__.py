"""Searches over mesh views: solves each, fits it into memory and proves how good it is."""
