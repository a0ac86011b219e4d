"""How long is a run planned again when hosts leave or come, from its last plan, and how good is that plan?

Asked: at most 30% of the time of the first planning. Times are CPU seconds of planning a traced step; tracing comes
before both. The first planning for the new devices is what is compared with, in time and in the simulated step.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parent))

from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.graph import trace
from meshwright.planning import plan_traced

T = TypeVar("T")
JOBS = [
    # model, batch, sequence length, devices before, devices after, method
    ("gpt2-774m", 96, 1024, "4x8 h100", "3x8 h100", mw.Auto()),
    ("gpt2-774m", 96, 1024, "3x8 h100", "4x8 h100", mw.Auto()),
    ("llama3-8b", 120, 2048, "8x8 h100", "6x8 h100", mw.Auto()),
    ("llama3-8b", 120, 2048, "8x8 h100", "15x8 h100", mw.Auto()),
    ("mixtral-8x7b", 128, 2048, "16x8 h100", "8x8 h100", mw.Auto()),
    ("wide-resnet-50-2", 384, 0, "4x4 a100-40gb", "3x4 a100-40gb", mw.Auto()),
    ("gpt2-774m", 96, 1024, "4x8 h100", "3x8 h100", mw.Auto(pipeline=True)),
    ("gpt2-774m", 96, 1024, "4x8 h100", "3x8 h100", mw.ThreeD(data=4, tensor=2, pipeline=4, microbatch=2)),
]


def timed(call: Callable[[], T]) -> tuple[T, float]:
    started = time.process_time()
    return call(), time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*")
    chosen = parser.parse_args().models
    small = zoo.build("llama-tiny")
    mw.plan(small.train_step, small.state, small.batch, cluster="2x4 h100")  # loads compiled kernels
    rows = []
    for model, batch, seq, before, after, method in JOBS:
        if chosen and model not in chosen:
            continue
        example = zoo.build(model, batch=batch, **({"seq": seq} if seq else {}))
        traced = trace(example.train_step, example.state, example.batch, cluster=mw.cluster(before))
        last, first_s = timed(lambda: plan_traced(traced, before, None, method))  # noqa: B023
        cold_method = mw.Auto(pipeline=True) if isinstance(method, mw.ThreeD) else method
        cold, cold_s = timed(lambda: plan_traced(traced, after, None, cold_method))  # noqa: B023
        warm, warm_s = timed(lambda: plan_traced(traced, after, None, method, last=last))  # noqa: B023
        words = (f"{first_s:.1f} s", f"{cold_s:.1f} s", f"{warm_s:.1f} s", f"{warm_s / first_s:.0%}")
        quick = f"{warm.step_s / cold.step_s - 1:+.1%}"
        row = (model, method.name, f"{before} → {after}", *words, quick, "yes" if warm.remarks else "no")
        print(*row, sep=" | ", file=sys.stderr, flush=True)
        rows.append(row)
    header = ("model", "method", "devices", "first", "first for the new ones", "from the last", "part", "step", "taken")
    table("Planning again", __doc__ or "", header, rows)


if __name__ == "__main__":
    main()
