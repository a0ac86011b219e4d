"""Runtime: plans on real devices."""
