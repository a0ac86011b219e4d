"""Replays published training results: a row of a table becomes a recipe, is simulated, and is compared with the row."""
