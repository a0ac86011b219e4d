"""Compiling for tests: most of their time goes into it, and what is compiled runs once or twice."""

from importlib.metadata import version

QUICK: dict[str, bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,  # a program in many parts takes a tenth longer, and the cores have work
}
if tuple(map(int, version("jax").split(".")[:2])) < (0, 11):  # the newer emitters take five times as long; later
    QUICK["xla_cpu_use_fusion_emitters"] = False  # versions have no others

#: The same for `XLA_FLAGS`, where a test's programs are compiled by what it tests.
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())

# The CPU backend would drop the barriers and then merge what a checkpoint computes again with the first time.
KEEPING_CHECKPOINTS = QUICK | {"xla_disable_hlo_passes": "cse_barrier_expander"}
