"""One device's share of a plan, of a part of it or of a stage, as a program of its own with stand-ins."""
