"""Report: one self-contained web page about a plan, made of the real files under `assets/`. Needs no JAX."""
