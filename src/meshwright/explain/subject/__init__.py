"""The program that is explained, with what it keeps in memory over time."""
