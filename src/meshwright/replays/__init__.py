"""Published steps as plans: a row's model is planned as its authors split it, and the plan is simulated."""
