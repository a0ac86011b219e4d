"""Exact reductions: each makes the problem smaller, keeps its optimum, and can be undone."""
