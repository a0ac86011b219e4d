"""Plans as versioned files: written deterministically, read back with every part checked."""

PLANS = "MESHWRIGHT_PLANS"  # names the environment's directory of plans that are kept
