"""Replays published training results: a row of a table becomes a recipe, is simulated, and is held against the row."""
