"""Searches for stages: equal ones in closed form, unequal ones by dynamic programming."""
