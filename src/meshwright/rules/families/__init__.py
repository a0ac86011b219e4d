"""The families of primitives: one file for each, with its rules by primitive in `RULES`."""
