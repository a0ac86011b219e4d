"""Exact search: bucket elimination and branch and bound."""
