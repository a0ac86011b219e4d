"""Compiling for tests: most of their time goes into it, and what is compiled runs once or twice."""

import jax

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
if jax.__version_info__ < (0, 11):  # the newer emitters take five times as long; later versions have no others
    QUICK["xla_cpu_use_fusion_emitters"] = False

# The CPU backend would drop the barriers and then merge what a checkpoint computes again with the first time.
KEEPING_CHECKPOINTS = QUICK | {"xla_disable_hlo_passes": "cse_barrier_expander"}
