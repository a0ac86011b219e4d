"""What else was possible, and what it would have cost."""
