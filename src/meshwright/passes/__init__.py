"""Analysis, profile and search as passes one by one, and the test that measures every combination of a segment."""
