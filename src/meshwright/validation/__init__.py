"""Replays published training results, as recipes and as programs that are planned, and compares them with the table."""
