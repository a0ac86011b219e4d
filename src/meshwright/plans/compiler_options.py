"""The options of XLA that plans count on, by platform: `parallelize` compiles with them, and plans print them."""

from collections.abc import Mapping

from meshwright.hardware import Chip

Options = Mapping[str, str | int | bool]

# By default XLA's CPU backend orders operations for concurrency, which takes up to 1.4 times the memory of the plan.
# LLVM's level 3, the default, takes 10 to 20% longer to compile than level 2, and no measured program ran faster by it.
_CPU: Options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED", "xla_backend_optimization_level": 2}

# The scheduler that hides latency moves the start of a collective before, and its end behind, the compute between them;
# without it XLA's GPU backend starts and ends most of them at one place.
_GPU: Options = {"xla_gpu_enable_latency_hiding_scheduler": True}

_OF_PLATFORM: dict[str, Options] = {"cpu": _CPU, "gpu": _GPU, "cuda": _GPU, "rocm": _GPU}
_OF_VENDOR = {"NVIDIA": "gpu", "AMD": "gpu", "Google": "tpu"}


def options_of(platform: str) -> Options:
    """XLA's options for a platform, as JAX names it; none for platforms of which nothing was measured.

    Examples:
        >>> options_of("gpu")
        {'xla_gpu_enable_latency_hiding_scheduler': True}
    """
    return _OF_PLATFORM.get(platform, {})


def platform_of(chip: Chip | None) -> str:
    """JAX's name of the platform of a chip; empty where there is no chip."""
    if chip is None:
        return ""
    return "cpu" if "cpu" in chip.device_kinds else _OF_VENDOR.get(chip.vendor, "")
