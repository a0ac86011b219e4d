"""Simulates a training step: an event engine over compute, collectives and transfers, and its inputs."""
