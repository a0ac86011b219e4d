"""Serving of language models: what is promised, planned, simulated and run."""
