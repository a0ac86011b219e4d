"""Do runs survive lost and stopped processes and full disks? At random moments, under Ray and launch.

    python benchmarks/kills.py                       # 20 kills under Ray, with shrinking and growing, 10 under launch
    python benchmarks/kills.py --engine stages       # 8 kills of a pipeline of four stages under launch
    python benchmarks/kills.py --engine faults --kills 8 --seed 0 --rows rows.json

`faults` are kills (SIGKILL), stops (SIGSTOP) and, for root, a disk that is full until all ended, under launch; with
`--rows` a run adds its rows to those of earlier runs, and the table has all.
Asked: every run continues with the numbers of an undisturbed one; the other processes end within 15 s.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from report import table

ROWS, WIDTH, LAYERS, EVERY, MARGIN = 48, 256, 4, 5, 20
PHASES = ("stepping", "compiling", "saving", "restoring")
FAULTS = ("kill", "stop", "kill", "disk")  # in turn
DISK_MB = 32  # of the disk that is filled
LATEST_S = {"stepping": 1.0, "compiling": 3.0, "saving": 0.1, "restoring": 0.5}  # of a kill, after its phase began
AGAIN = ("compiling", "restoring")  # phases of a run that was killed just before
HANG_S = 300
STAGES = 4
ROUNDING = 2e-5  # of losses, relative


def train(folder, restore, save, stop=None, stages=0):
    """The run: marks its phase, records every loss, and ends at the step that the file `stop` holds."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import meshwright as mw

    process, folder = jax.process_index(), Path(folder)

    def mark(phase):
        text = json.dumps([os.getpid(), phase, jax.process_count(), jax.device_count(), time.time()])
        (folder / f"new{process}").write_text(text)
        (folder / f"new{process}").rename(folder / f"mark{process}")

    def init(key):
        return [jax.random.normal(k, (WIDTH, WIDTH)) * WIDTH**-0.5 for k in jax.random.split(key, LAYERS)]

    def step(params, x):
        def loss(params):
            y = x
            for weights in params:
                y = y + jnp.tanh(y @ weights)
            return jnp.mean((y - jnp.sin(x)) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), value

    def sample(number):
        return np.random.default_rng(number).normal(size=(ROWS, WIDTH)).astype(np.float32)

    mark("compiling")
    train_step = mw.parallelize(step, method=mw.ThreeD(pipeline=stages, microbatch=8) if stages else None)
    key = jax.random.key(0)
    train_step.plan(jax.eval_shape(init, key), sample(0))
    assert len(train_step.last_plan.stages) == stages
    mark("restoring")
    start, params = restore(train_step) or (0, mw.create_state(init, key, like=train_step))
    number = start
    while number < (stop or _read(folder / "stop") or 10**9):
        params, loss = train_step(params, sample(number))
        loss = float(loss)
        if number == start:
            mark("stepping")
        if process == 0:
            with open(folder / "losses", "a") as file:
                file.write(f"{number} {loss!r} {os.getpid()} {jax.device_count()} {time.time()}\n")
        number += 1
        if number % EVERY == 0 and not stop:
            mark("saving")
            save(number, params)
            mark("stepping")
        time.sleep(0 if stop else 0.05)


def _read(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # not there yet, or being written
        return None


def under_launch(folder, stages):
    """What a process of the launcher runs."""
    import meshwright as mw

    mw.initialize()
    directory = f"{folder}/checkpoints"

    def restore(like):
        steps = mw.saved_steps(directory)
        return (steps[-1], mw.restore(directory, like=like)) if steps else None

    train(folder, restore, lambda number, state: mw.save(directory, number, state, keep=3, wait=False), stages=stages)


def under_ray(config):
    """What a worker of Ray runs."""
    import meshwright.ray

    train(config["folder"], meshwright.ray.restore, meshwright.ray.save)


class Killer:
    """Kills processes of a run whose marks it reads, and notes how long the others and the resumption took."""

    def __init__(self, folder, seed):
        self.folder, self.random = Path(folder), random.Random(seed)
        self.rows = []

    def marks(self):
        found = {p: _read(self.folder / f"mark{p}") for p in range(8)}
        found = {p: mark for p, mark in found.items() if mark is not None and _is_alive(mark[0])}
        return found if found and len(found) == next(iter(found.values()))[2] else {}

    def losses(self):
        try:
            lines = (self.folder / "losses").read_text().splitlines()
        except OSError:
            return []
        return [(int(n), float(loss), int(pid), int(d), float(t)) for n, loss, pid, d, t in map(str.split, lines)]

    def wait(self, what, found):
        deadline = time.monotonic() + HANG_S
        while not (result := found()):
            if time.monotonic() > deadline:
                raise SystemExit(f"waited {HANG_S} s for {what}: {self.folder}")
            time.sleep(0.02)
        return result

    def kill(self, engine, phase, is_first, is_awaited):
        """Kills the first process or another one in a phase of its run; may wait until the run continues."""

        def victim():
            marks = self.marks()
            chosen = 0 if is_first else self.random.choice([p for p in marks if p] or [0])
            return (chosen, marks) if marks and marks.get(chosen, [0, ""])[1] == phase else None

        time.sleep(2 * self.random.random())
        victim, marks = self.wait(f"a process that is {phase}", victim)
        time.sleep(self.random.random() * LATEST_S[phase])
        then = time.time()
        os.kill(marks[victim][0], signal.SIGKILL)
        others = [mark[0] for p, mark in marks.items() if p != victim]
        self.wait("the others to end", lambda: not any(map(_is_alive, others)))
        ended = f"{time.time() - then:.1f} s"
        what = f"{'process 0' if is_first else 'a worker'} killed while {phase}"
        if is_awaited:
            self.note(engine, what, ended, then, lambda row: row[2] != marks[0][0])
        else:
            self.rows.append((engine, what, ended, "killed again before", "", ""))

    def stop_one(self, engine):
        """Stops a process while it steps, saves or compiles; the launcher finds it, and kills it."""
        marks = self.wait("all processes", self.marks)
        time.sleep(2 * self.random.random())
        victim = self.random.choice(list(marks))
        phase, then = (_read(self.folder / f"mark{victim}") or marks[victim])[1], time.time()
        os.kill(marks[victim][0], signal.SIGSTOP)
        others = [mark[0] for mark in marks.values()]
        self.wait("all to end", lambda: not any(map(_is_alive, others)))
        ended, what = (
            f"{time.time() - then:.1f} s",
            f"{'process 0' if victim == 0 else 'a worker'} stopped while {phase}",
        )
        self.note(engine, what, ended, then, lambda row: row[2] != marks[0][0])

    def fill_disk(self, engine):
        """Fills the disk that checkpoints are on, until all processes have ended for it."""
        marks, filler = self.wait("all processes", self.marks), self.folder / "checkpoints" / "filler"
        then = time.time()
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(2**16))
                file.flush()
        self.wait("all to end", lambda: not any(_is_alive(mark[0]) for mark in marks.values()))
        ended = f"{time.time() - then:.1f} s"
        filler.unlink()
        self.note(engine, "the disk is full", ended, then, lambda row: row[2] != marks[0][0])

    def all_faults(self, engine, number, has_disk):
        """Faults in turn, each of which the run continues after."""
        for i in range(number):
            fault = FAULTS[i % len(FAULTS)]
            self.wait("the run to step", lambda: {mark[1] for mark in self.marks().values()} == {"stepping"})
            began = len(self.losses())
            self.wait("some steps", lambda: len(self.losses()) >= began + 2 * EVERY)  # noqa: B023
            if fault == "stop":
                self.stop_one(engine)
            elif fault == "disk" and has_disk:
                self.fill_disk(engine)
            else:
                phase = self.random.choice(("stepping", "saving"))
                self.kill(engine, phase, self.random.random() < 0.3, is_awaited=True)

    def note(self, engine, what, ended, then, is_new):
        """Waits until a run records a loss that is new after some moment, and adds a row."""
        row = self.wait("the run to continue", lambda: next((r for r in self.losses() if r[4] > then and is_new(r)), 0))
        self.rows.append((engine, what, ended, f"{row[4] - then:.1f} s", row[3], row[0]))
        print(*self.rows[-1], sep=" | ", file=sys.stderr, flush=True)

    def kill_often(self, engine, number):
        for i in range(number):
            phase, later = PHASES[i % len(PHASES)], PHASES[(i + 1) % len(PHASES)]
            self.kill(engine, phase, self.random.random() < 0.5, later not in AGAIN or i == number - 1)

    def stop(self):
        last = self.losses()[-1][0]
        (self.folder / "stop").write_text(str(last + MARGIN))


def _is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@contextlib.contextmanager
def small_disk(folder):
    """A disk of a few megabytes, where this user may make one."""
    Path(folder).mkdir()
    made = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", folder]
    has_disk = not os.geteuid() and subprocess.run(made, check=False, capture_output=True).returncode == 0
    try:
        yield has_disk
    finally:
        if has_disk:
            subprocess.run(["umount", "-l", folder], check=False)


def run_faults(folder, kills, seed):
    with small_disk(f"{folder}/checkpoints") as has_disk:
        return run_launch(folder, kills, seed, faults=lambda killer: killer.all_faults("launch", kills, has_disk))


def run_launch(folder, kills, seed, stages=0, faults=None):
    processes = stages // 2 or 4
    command = [sys.executable, "-m", "meshwright", "launch", "--processes", str(processes)]
    command += ["--devices-per-process", "2", "--restarts", str(10 * kills)]
    command += [__file__, "--child", folder, "--stages", str(stages)]
    environment = os.environ | {"MESHWRIGHT_MEASURE": "never", "JAX_PLATFORMS": "cpu"}
    killer = Killer(folder, seed)
    with open(f"{folder}/output", "w") as output:
        run = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            if faults is None:
                killer.kill_often("stages" if stages else "launch", kills)
            else:
                faults(killer)
            killer.stop()
            assert run.wait(HANG_S) == 0, Path(f"{folder}/output").read_text()[-3000:]
        finally:
            run.kill()
    return killer


def run_ray(folder, kills, seed):
    os.environ |= {"MESHWRIGHT_MEASURE": "never", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "20"  # for workers on a node whose loss is not known yet
    import ray
    import ray.train
    from ray.cluster_utils import Cluster

    import meshwright.ray

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1, include_dashboard=False) for _ in range(4)]
    ray.init(address=cluster.address, log_to_driver=False)
    trainer = meshwright.ray.Trainer(
        under_ray,
        ray.train.ScalingConfig(num_workers=(2, 4), elastic_resize_monitor_interval_s=2),
        ray.train.RunConfig(
            name="kills",
            storage_path=folder,
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=3),
        ),
        train_loop_config={"folder": folder},
        devices_per_worker=2,
    )
    killer = Killer(folder, seed)

    outcome = []
    training = threading.Thread(target=lambda: outcome.append(trainer.fit()), daemon=True)
    training.start()
    killer.wait("the first steps", lambda: len(killer.losses()) > 2 * EVERY)
    killer.kill_often("Ray", kills)
    for devices in (6, 4):
        then = time.time()
        cluster.remove_node(nodes.pop(), allow_graceful=False)
        killer.note("Ray", "a node is lost", "–", then, lambda row, devices=devices: row[3] == devices)
    then = time.time()
    nodes.extend(cluster.add_node(num_cpus=1, include_dashboard=False) for _ in range(2))
    killer.note("Ray", "two nodes are added", "–", then, lambda row: row[3] == 8)
    killer.stop()
    training.join(HANG_S)
    assert outcome and outcome[0].error is None, outcome
    ray.shutdown()
    cluster.shutdown()
    return killer


def check(killer):
    """The greatest difference of any loss from the undisturbed run's, relative."""
    folder = killer.folder / "undisturbed"
    folder.mkdir()
    steps = 1 + max(row[0] for row in killer.losses())
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "MESHWRIGHT_MEASURE": "never"}
    command = [sys.executable, __file__, "--undisturbed", str(steps), "--child", str(folder)]
    subprocess.run(command, check=True, env=environment | {"JAX_PLATFORMS": "cpu"}, stderr=subprocess.DEVNULL)
    right = {row[0]: row[1] for row in Killer(folder, 0).losses()}
    worst = max(abs(loss / right[number] - 1) for number, loss, *_ in killer.losses())
    assert worst <= ROUNDING and sorted(right) == sorted({row[0] for row in killer.losses()}), worst
    return worst, steps


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=["ray", "launch", "stages", "faults"])
    parser.add_argument("--kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=Path, help="a file with the rows of earlier runs, to which this one's are added")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--stages", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--undisturbed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.undisturbed:
        train(options.child, lambda like: None, None, options.undisturbed)
    elif options.child:
        under_launch(options.child, options.stages)
    else:
        rows, said = [], []
        staged = partial(run_launch, stages=STAGES)
        if options.rows and options.rows.exists():
            rows, said = json.loads(options.rows.read_text())
        engines = {"launch": (run_launch, 10), "stages": (staged, 8), "ray": (run_ray, 20), "faults": (run_faults, 8)}
        for engine, (run, kills) in engines.items():
            if options.engine == engine or (options.engine is None and engine != "faults"):
                with tempfile.TemporaryDirectory() as folder:
                    killer = run(folder, options.kills or kills, options.seed)
                    worst, steps = check(killer)
                    rows += killer.rows
                    said.append(f"{engine}: {steps} steps, losses within {worst:.1e} of the undisturbed run's")
        if options.rows:
            options.rows.write_text(json.dumps([rows, said]))
        header = ("engine", "disturbance", "others end after", "continues after", "devices", "from step")
        title = f"Kills {options.engine}" if options.engine else "Kills"
        table(title, f"{__doc__}\n{'; '.join(said)}.", header, rows)


if __name__ == "__main__":
    main()
