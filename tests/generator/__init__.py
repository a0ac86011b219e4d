"""Programs drawn at random, with awkward numbers, and whether a plan of one computes what one device computes."""
