"""A machine and what was measured on it, made up."""

from dataclasses import replace

from meshwright.profiler.survey import Machine, Reading, Survey

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
MACHINE = Machine("here", "cpu", "cpu", 1, 8, 2, "", "0.10.2", "0.10.2")
ALPHA_S, BETA_S = 1e-4, 1e-9


def collectives(size, across=False, kinds=KINDS, alpha_s=ALPHA_S, beta_s=BETA_S):
    sizes = (2**12, 2**20)
    return [Reading(k, b, alpha_s + beta_s * b, size=size, across=across) for k in kinds for b in sizes]


def compute(launch_s=5e-6, ramp_s=1e-5, float32=4e9, bfloat16=2e9, bandwidth=8e9, special_s=2e-9, fetch_s=5e-8):
    rates = (("float32", float32), ("bfloat16", bfloat16))
    products = [Reading("matmul", f, launch_s + ramp_s + f / r, dtype=d) for d, r in rates for f in (1e6, 1e7)]
    streams = [Reading("memory", b, b / bandwidth) for b in (1e6, 1e7)]
    special = Reading("special", 1e5, 4e5 / bandwidth + 1e5 * special_s)
    convolutions = [
        Reading("window", n, launch_s + ramp_s + f / float32 + n * fetch_s, flops=f)
        for n, f in ((2e4, 1e6), (1e4, 3e6))
    ]
    return [Reading("launch", 0.0, launch_s), *streams, *products, special, *convolutions]


def survey(readings=None, machine=MACHINE, memory_bytes=2**31, date="2026-01-02"):
    readings = [*compute(), *collectives(8), *collectives(2)] if readings is None else readings
    return Survey(machine, date, 3.0, 0.5, memory_bytes, tuple(readings))


def replace_devices(machine, count):
    return replace(machine, devices_per_process=count)
