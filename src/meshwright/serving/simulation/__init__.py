"""Simulates serving: arrivals go to the engine's own scheduler, whose steps are priced instead of run."""
