"""What `test_several_processes.py` runs in each of two processes: a pipeline trains a loaded model, and saves it.

Usage: in_processes.py MODEL FOLDER
"""

import sys
from pathlib import Path

import jax

import meshwright as mw


def main(source, folder):
    mw.initialize()
    model = mw.hf.load(source, scan=True, dtype="float32")
    example = model.example(batch=4, seq=16)
    step = mw.parallelize(example.train_step, method=mw.ThreeD(pipeline=2, microbatch=2))
    step.plan(example.state, example.batch)
    state = mw.create_state(example.init, jax.random.key(0), like=step)
    state |= {"params": mw.hf.load(source, like=step, scan=True, dtype="float32").params}
    mw.hf.save(folder / "read", state["params"], model.config)
    state, loss = step(state, example.sample(0))
    print(f"loss {float(loss):.5f}", flush=True)
    mw.hf.save(folder / "trained", state["params"], model.config, shard_bytes=20_000)
    try:
        mw.hf.save(folder / "trained", state["params"], model.config)
    except mw.OutputError as error:
        print(error, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
