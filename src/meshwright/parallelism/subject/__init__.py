"""The program that is judged, with its memory over time."""
