"""The program that is judged, with what it keeps in memory over time."""
