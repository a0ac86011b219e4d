"""Plans as versioned files: written deterministically, read back with every part checked."""
