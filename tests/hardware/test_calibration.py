"""Holds predicted times against published measurements; needs the data beside the repository."""

import csv
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from meshwright.hardware import cluster, find_chip

DATA = Path(os.environ.get("MESHWRIGHT_DATA", Path(__file__).parents[3] / "shared" / "data"))

pytestmark = pytest.mark.skipif(
    not (DATA / "nccl_measured.csv").exists(),
    reason=f"no calibration data in {DATA}: set MESHWRIGHT_DATA to the folder that holds nccl_measured.csv",
)


def rows(name: str) -> Iterator[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def errors(system: str, chip: str, at_least_bytes: float = 0) -> np.ndarray:
    """Relative errors over all collectives, group sizes and message sizes of one measured host."""
    found = []
    for row in rows("nccl_measured.csv"):
        size, num = float(row["message_bytes"]), int(row["num_gpus"])
        if row["system"] != system or size < at_least_bytes:
            continue
        kind = row["op"].replace("alltoall", "all_to_all")
        whole = size * num if kind == "all_to_all" else size  # nccl-tests counts what one device holds
        mesh = cluster(f"{max(1, num // 8)}x{min(num, 8)} {chip}").mesh((num,))
        found.append(mesh.collective_s(kind, (0,), whole) / (float(row["latency_us"]) * 1e-6) - 1)
    return np.abs(found)


# Bounds: what was measured when the links were fitted, plus a little for rounding.
@pytest.mark.parametrize(
    ("system", "chip", "median", "p90"),
    [
        ("a100_sxm", "a100-80gb", 0.05, 0.15),
        ("h100_sxm", "h100", 0.05, 0.17),
        ("h200_sxm", "h200", 0.05, 0.17),
        ("b200_sxm", "b200", 0.05, 0.14),
        ("l40s", "l40s", 0.12, 0.45),
    ],
)
def test_collectives_inside_a_host(system, chip, median, p90):
    found = errors(system, chip)
    assert len(found) == 252
    assert np.median(found) < median
    assert np.quantile(found, 0.9) < p90


@pytest.mark.parametrize(
    ("system", "chip", "worst"),
    [
        ("a100_1node(nccl-tests)", "a100-80gb", 0.08),
        ("h200_sxm_8gpu_1node(torch bench)", "h200", 0.05),
        ("b200_p6_1node(torch bench)", "b200", 0.12),
        ("b200_p6_4nodes_EFA_50GBs_per_gpu(torch bench)", "b200", 0.13),
    ],
)
def test_large_all_reduces_of_hosts_that_were_not_fitted(system, chip, worst):
    found = errors(system, chip, at_least_bytes=2**29)
    assert len(found) == 6
    assert found.max() < worst


def test_rings_between_hosts_have_the_bandwidth_of_nccls_own_table():
    ratios = []
    for row in rows("nccl_h100_tuning_table.csv"):
        if (row["algo"], row["proto"]) != ("ring", "SIMPLE") or row["nodes"] == "1":
            continue
        kind = "all_reduce" if row["op"] == "all_reduce" else "all_gather"
        nodes, inside = int(row["nodes"]), int(row["gpus_per_node_in_group"])
        mesh = cluster(f"{nodes}x8 h100").mesh((nodes, inside, 8 // inside) if inside < 8 else (nodes, 8))
        ratios.append(1e-9 / mesh.alternatives(kind, (0, 1))[-1][1] / float(row["algbw_GBs"]))
    assert len(ratios) == 40
    assert np.median(np.abs(np.array(ratios) - 1)) < 0.02
    assert np.abs(np.array(ratios) - 1).max() < 0.16


@pytest.mark.parametrize(
    ("system", "chip", "median"),
    [
        ("a100", "a100-80gb", 0.03),
        ("h100", "h100", 0.04),
        ("h200", "h200", 0.04),
        ("b200", "b200", 0.04),
        ("gb200", "gb200", 0.05),
        ("l40s", "l40s", 0.05),
    ],
)
def test_matrix_products_reach_the_measured_efficiency(system, chip, median):
    table = [row for row in rows("gemm_efficiency_vs_gflop.csv") if row["system"] == system]
    flops = np.array([np.sqrt(float(r["gflop_bin_low"]) * float(r["gflop_bin_high"])) * 1e9 for r in table])
    device = find_chip(chip)
    predicted = flops / device.matmul_s(flops, "bfloat16") / device.peak_flops("bfloat16")
    measured = np.array([float(row["eff_median"]) for row in table])
    assert np.median(np.abs(predicted / measured - 1)) < median
