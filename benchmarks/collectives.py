"""By how much do modelled collectives miss measured ones, by size, by kind and by how many devices take part?

Measured rows are of nccl-tests and of torch's benchmark, inside hosts and on four hosts; beyond those, NCCL's own
tuning table of H100 hosts tells the time of an algorithm as a latency and a rate, of which a library takes the least.

    python benchmarks/collectives.py        # MESHWRIGHT_DATA names the folder of nccl_measured.csv
"""

import csv
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).parent))

from report import table

from meshwright.hardware import cluster

DATA = Path(os.environ.get("MESHWRIGHT_DATA", Path(__file__).parents[2] / "shared" / "data"))
SIZES = {"up to 64 KiB": 2**16, "up to 4 MiB": 2**22, "up to 128 MiB": 2**27, "above": 2**60}
CHIPS = {"a100": "a100-80gb", "h100": "h100", "h200": "h200", "b200": "b200", "gb200": "gb200", "l40s": "l40s"}
TABLE_BYTES = [2**power for power in range(14, 32, 2)]

Row = tuple[str, str, str, float]  # where, kind, regime of size, relative error


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _regime(num_bytes: float) -> str:
    return next(name for name, most in SIZES.items() if num_bytes <= most)


def measured() -> Iterator[Row]:
    """Rows of nccl-tests and of torch's benchmark."""
    for row in _rows("nccl_measured.csv"):
        num_bytes, count = float(row["message_bytes"]), int(row["num_gpus"])
        system = row["system"].split("_")[0]
        if system not in CHIPS:
            continue  # of a system that is not named
        kind = row["op"].replace("alltoall", "all_to_all")
        whole = num_bytes * count if kind == "all_to_all" else num_bytes  # nccl-tests counts what one device holds
        per_host = min(count, 4 if system == "gb200" else 8)
        mesh = cluster(f"{max(1, count // per_host)}x{per_host} {CHIPS[system]}").mesh((count,))
        where = "several hosts, measured" if count > per_host else f"one host, {system}"
        yield (
            where,
            kind,
            _regime(num_bytes),
            mesh.collective_s(kind, (0,), whole) / (1e-6 * float(row["latency_us"])) - 1,
        )


def tuned() -> Iterator[Row]:
    """What NCCL expects on 2 to 32 hosts of H100s: the quickest algorithm of its table for each size."""
    ways: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    for row in _rows("nccl_h100_tuning_table.csv"):
        if row["nodes"].isdigit() and int(row["nodes"]) > 1 and row["gpus_per_node_in_group"].isdigit():
            if not row["algbw_GBs"].replace(".", "").isdigit():
                continue  # a formula
            place = row["op"], int(row["nodes"]), int(row["gpus_per_node_in_group"])
            ways[place].append((1e-6 * float(row["latency_us"]), 1e9 * float(row["algbw_GBs"])))
    for (op, nodes, inside), known in ways.items():
        kind = op.split("/")[0]
        mesh = cluster(f"{nodes}x8 h100").mesh((nodes, inside, 8 // inside) if inside < 8 else (nodes, 8))
        for num_bytes in TABLE_BYTES:
            expected_s = min(latency_s + num_bytes / rate for latency_s, rate in known)
            yield (
                f"{nodes} hosts, NCCL's table",
                kind,
                _regime(num_bytes),
                mesh.collective_s(kind, (0, 1), num_bytes) / expected_s - 1,
            )


def main() -> None:
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for where, kind, regime, error in (*measured(), *tuned()):
        groups[where, kind, regime].append(error)
        groups[where, "all", regime].append(error)
    order = list(SIZES)
    shown = [
        (*key, len(errors), f"{median(errors):+.0%}", f"{mean(map(abs, errors)):.0%}", f"{max(errors, key=abs):+.0%}")
        for key, errors in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1], order.index(item[0][2])))
    ]
    header = ("where", "kind", "size", "rows", "median error", "mean of its size", "worst")
    table("Collectives", (__doc__ or "").split("\n")[0], header, shown)


if __name__ == "__main__":
    main()
