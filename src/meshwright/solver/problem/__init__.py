"""Choice problems, their solutions, and an independent pricer."""
