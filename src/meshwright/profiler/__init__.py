"""Measures the machine at hand: rates, bandwidth and collectives of the local devices, once, and keeps them."""

from meshwright.profiler.local import cluster, known_survey

__all__ = ["cluster", "known_survey"]
