"""For how long does `mw.save(…, wait=False)` keep a run waiting?

GPT with AdamW is trained on all devices. `returns` is how long a call takes: the first of a process, in which nothing
of Orbax is loaded and nothing compiled, and the median of those after it; on a busy machine the time of its thread says
more. `step beside` is the median step while a save is written; steps wait for the copy of what they are given.
`complete` is when the checkpoint is on disk.

    python benchmarks/saving.py [--model gpt2-125m] [--batch 8] [--seq 512]

Asked: 2% of a step, or 50 ms, the first time too.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

SAVES, STEPS = 4, 6  # the first save of the process, and three more; steps between saves


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt2-125m")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    given = parser.parse_args()
    import jax
    from report import table

    jax.config.update("jax_num_cpu_devices", 8)  # where there is nothing better
    import meshwright as mw
    from meshwright import zoo

    model = zoo.build(given.model, batch=given.batch, seq=given.seq)
    step = mw.parallelize(model.train_step, method=mw.Zero(stage=3))
    state = mw.create_state(model.init, jax.random.key(0), like=step, example=(model.batch,))
    batch = model.sample(0)

    def run(count: int) -> list[float]:
        nonlocal state
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            state, loss = step(state, batch)
            jax.block_until_ready((state, loss))
            times.append(time.perf_counter() - begin)
        return times

    alone = statistics.median(run(STEPS)[2:])
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))
    returned, busy, beside, complete = [], [], [], []
    with tempfile.TemporaryDirectory(dir=os.environ.get("SAVE_IN")) as directory:
        for number in range(SAVES):
            begin, begin_busy = time.perf_counter(), time.thread_time()
            saving = mw.save(directory, number, state, keep=1, wait=False)
            returned.append(time.perf_counter() - begin)
            busy.append(time.thread_time() - begin_busy)
            while not saving.is_done:
                beside += run(1)
            complete.append(time.perf_counter() - begin)
            saving.wait()
    waits = {"the first save returns after": [0], "later ones return after": range(1, SAVES)}
    rows = [
        ("state", f"{num_bytes / 2**20:,.0f} MiB on {jax.device_count()} {jax.devices()[0].device_kind}"),
        ("step alone", f"{1e3 * alone:.1f} ms"),
    ]
    for name, numbers in waits.items():
        waited, worked = (statistics.median(times[i] for i in numbers) for times in (returned, busy))
        rows.append((name, f"{1e3 * waited:.1f} ms, {waited / alone:.1%} of a step; {1e3 * worked:.1f} of the thread"))
    rows += [
        ("step beside", f"{1e3 * statistics.median(beside):.1f} ms, at most {1e3 * max(beside):.1f}"),
        ("complete", f"{complete[0]:.2f} s the first time, then {statistics.median(complete[1:]):.2f} s"),
    ]
    load = f"{os.getloadavg()[0]:.0f} processes were running on {os.cpu_count()} cores."
    table("Saving", f"{(__doc__ or '').split(chr(10) * 2 + '    python')[0]}\n\n{load}", ("what", "found"), rows)


if __name__ == "__main__":
    main()
