"""What happens to requests that are malformed, clients that leave, and servers that are ended or lose their worker?

    python benchmarks/serving_faults.py [--kills 5] [--malformed 400]

A random model of one layer behind `meshwright serve`, in processes of its own, on whatever machine this is: times are
those of the whole path with the model's loading and compiling, and depend on the machine; counts do not. How many steps
a cancelled request keeps its blocks is counted in an engine of this process.
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from report import table

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.compiling import FLAGS

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = FLAGS  # a worker that is replaced compiles again

import jax

import meshwright as mw
from meshwright import zoo
from meshwright.serving.requests import Sampling
from meshwright.zoo import llama
from tests.serving.server.running import Running, first_line, write_tokenizer
from tests.serving.server.test_refusals import FIELDS, GOOD, WEIRD

SIZES = {"max_len": 256, "slots": 8, "chunk": 16, "queue": 32, "dtype": "float32"}
TEXT = "/v1/completions"


def written(folder):
    """A random model with a token for every byte."""
    config = replace(zoo.build("llama-tiny", layers=1).config, vocab=264, dtype="float32")
    mw.hf.save(folder, llama.init(config, jax.random.key(0)), config)
    return write_tokenizer(folder)


@contextmanager
def serving(folder):
    """A server and all that it said."""
    sizes = itertools.chain(*((f"--{name.replace('_', '-')}", str(size)) for name, size in SIZES.items()))
    command = [sys.executable, "-m", "meshwright", "serve", str(folder), "--port", "0", *sizes]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        lines = []
        yield Running(process, int(first_line(process, " at http://", lines).rsplit(":", 1)[1]), lines)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def malformed(server, count):
    """Statuses of requests that are wrong in one field, cut off, or no JSON at all."""
    rng, statuses = random.Random(0), Counter()
    cases = list(itertools.product(GOOD, FIELDS, WEIRD))
    bodies = [(path, GOOD[path] | {name: value}) for path, name, value in rng.sample(cases, count // 2)]
    good = json.dumps(GOOD[TEXT])
    bodies += [(TEXT, good[: rng.randrange(len(good))].encode()) for _ in range(count // 4)]
    bodies += [(TEXT, rng.randbytes(rng.randrange(80))) for _ in range(count - len(bodies))]
    told = 0
    for path, body in bodies:
        status, _, answer = server.ask(path, body)
        statuses[status] += 1
        told += status == 200 or ("error" in answer and "Traceback" not in json.dumps(answer))
    assert server.complete(max_tokens=2)["choices"]
    return [
        f"{len(bodies)} malformed requests",
        f"statuses {dict(sorted(statuses.items()))}; {told} answers are texts or say in a sentence what is wrong",
        f"{sum(number for status, number in statuses.items() if status >= 500)} of 500 and above",
    ]


def left(server, count):
    """Clients that leave in the middle of their streams."""
    for _ in range(count):
        with server.stream(max_tokens=200) as events:
            next(events)
    begun = time.perf_counter()
    while (figures := server.engine())["running"] or figures["blocks_used"]:
        assert time.perf_counter() - begun < 30
    return [f"{count} clients leave their streams", f"{figures['blocks_used']} blocks taken afterwards", ""]


def cancelled(folder, count):
    """Steps for which a cancelled request keeps its blocks, beside another one that goes on."""
    steps = []
    sampling = Sampling(150, temperature=0.0, ignore_eos=True)
    with mw.get_model(folder, cluster="1x1 cpu", **SIZES) as model:
        for _ in range(count):
            other, handle = (model.engine.submit([5, 6, 7, number], sampling) for number in (8, 9))
            next(iter(handle))
            before = model.engine.stats()
            handle.cancel()
            while (now := model.engine.stats()).blocks_used >= before.blocks_used:
                pass
            steps.append(now.steps - before.steps)
            other.cancel()
            while model.engine.stats().blocks_used:
                pass
    return [
        f"{count} requests are cancelled in an engine",
        f"its blocks are free after {Counter(steps).most_common(1)[0][0]} steps mostly, {max(steps)} at most",
        "asked: 2 steps",
    ]


def ended(folder, count):
    """SIGTERM while texts are generated."""
    with serving(folder) as server, ThreadPoolExecutor(count) as pool:
        body = {"prompt": "a", "max_tokens": 120, "ignore_eos": True}
        asked = [pool.submit(server.ask, TEXT, body) for _ in range(count)]
        while server.engine()["running"] < min(count, SIZES["slots"]):
            pass
        server.terminate()
        whole = sum(one.result()[2]["usage"]["completion_tokens"] == 120 for one in asked)
        code = server.process.wait(60)
    return [f"SIGTERM with {count} open requests", f"{whole} answered whole, exit code {code}", ""]


def killed(server):
    """SIGKILL of the worker's process: seconds until all open requests have failed, and until the next is answered."""
    with ThreadPoolExecutor(8) as pool:
        body = {"prompt": "a", "max_tokens": 240, "ignore_eos": True}
        asked = [pool.submit(server.ask, TEXT, body) for _ in range(8)]
        while server.engine()["running"] < 8:
            pass
        begun = time.perf_counter()
        os.kill(server.worker(), signal.SIGKILL)
        statuses = Counter(one.result()[0] for one in asked)
        failed_s = time.perf_counter() - begun
    while server.ask("/health")[0] != 200:
        time.sleep(0.05)
    server.complete(max_tokens=2)
    return statuses, failed_s, time.perf_counter() - begun


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--malformed", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = written(Path(name) / "random")
        with serving(folder) as server:
            rows = [malformed(server, options.malformed), left(server, 50)]
            kills = [killed(server) for _ in range(options.kills)]
            server.terminate()
            said = server.lines + server.process.communicate(timeout=60)[1].splitlines()
        rows.append(cancelled(folder, 100))
        rows.append(ended(folder, 16))
    statuses = sum((one[0] for one in kills), Counter())
    failed, back = ([round(one[at], 2) for one in kills] for at in (1, 2))
    rows.append(
        [
            f"SIGKILL of the worker with 8 open requests, {len(kills)} times",
            f"statuses {dict(statuses)}; all have failed after {max(failed)} s at most",
            f"asked: 503 within 5 s; serves again after {min(back)} to {max(back)} s",
        ]
    )
    rows.append(["what the server said meanwhile", f"{sum('Traceback' in line for line in said)} tracebacks", ""])
    load = f"load average {os.getloadavg()[0]:.1f} at the end"
    question = f"Requests that are malformed, clients that leave, servers that end, workers that die ({load})"
    table("Serving faults", question, ("what", "what happened", ""), rows)


if __name__ == "__main__":
    main()
