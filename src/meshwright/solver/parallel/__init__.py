"""Searches in several processes that share their incumbents."""
