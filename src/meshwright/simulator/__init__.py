"""Simulates a training step: an event engine over compute, collectives and transfers, and what feeds it."""
