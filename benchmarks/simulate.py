"""How long does it take to simulate a step? Asked: a GPT of 10¹² parameters on 384×8 devices in at most 2 s."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from report import table

from meshwright.simulator.engine import simulate_work
from meshwright.simulator.transformer.work import recipe_work
from meshwright.validation.row import Row, recipe_of

SHAPE = {"source": "Megatron-LM SC'21", "vocab": "51200", "seq": "2048", "precision": "fp16", "recompute": "full"}
CASES = (
    {
        "model": "GPT-18B",
        "hidden": "6144",
        "layers": "40",
        "heads": "48",
        "gpus": "256",
        "tp": "8",
        "pp": "1",
        "batch": 1024,
    },
    {
        "model": "GPT-175B",
        "hidden": "12288",
        "layers": "96",
        "heads": "96",
        "gpus": "1536",
        "tp": "8",
        "pp": "12",
        "batch": 1536,
    },
    {
        "model": "GPT-1T",
        "hidden": "25600",
        "layers": "128",
        "heads": "160",
        "gpus": "3072",
        "tp": "8",
        "pp": "64",
        "batch": 3072,
    },
    {
        "model": "GPT-1T",
        "hidden": "25600",
        "layers": "128",
        "heads": "160",
        "gpus": "10240",
        "tp": "8",
        "pp": "64",
        "batch": 10240,
    },
)


def main() -> None:
    rows = []
    for case in CASES:
        cells = SHAPE | {name: str(value) for name, value in case.items()}
        cells |= {
            "global_batch": cells["batch"],
            "gpu_type": "A100-SXM-80GB",
            "microbatch": "1" if case["pp"] != "1" else "16",
        }
        started = time.process_time()
        found = simulate_work(recipe_work(recipe_of(Row(cells)), case["model"]))
        peak = found.peak_bytes
        seconds = time.process_time() - started
        passes = sum(len(run.passes) for run in found.stages)
        rows.append(
            (
                case["model"],
                case["gpus"],
                f"{passes:,}",
                f"{found.step_s:.1f} s",
                f"{peak / 2**30:.0f} GiB",
                f"{seconds:.2f} s",
            )
        )
    header = ("model", "devices", "passes", "simulated step", "memory", "processor time")
    table("Simulating", __doc__ or "", header, rows)


if __name__ == "__main__":
    main()
