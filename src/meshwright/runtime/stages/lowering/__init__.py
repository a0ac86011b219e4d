"""Makes JAX programs of the programs of a stage: on its devices, split as the plan says."""
