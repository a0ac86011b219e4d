"""Do runs survive lost and stopped processes and full disks, at random moments, under `launch` and Ray?

    python benchmarks/kills.py --engine launch --faults 16 --seed 0 --rows rows.json
    python benchmarks/kills.py --engine ray --faults 12 --nodes
    python benchmarks/kills.py --engine stages --faults 6       # a pipeline of two stages under launch

A fault is a process that is killed (SIGKILL) or stopped (SIGSTOP), or, for root, a disk with the checkpoints that is
full until all have ended. It comes while a run plans, restores, compiles its first step, steps or saves. `trains again`
is the time from the fault to the first step that is new, and `CPU` what process 0 took of it, Python's start included;
a run that is to be disturbed while it starts is first disturbed while it steps. `--nodes` removes a node from the
cluster and adds one. With `--rows` a run adds its rows to those of earlier runs, and the tables have all.
Every loss is compared with those of a run that nobody disturbed; nothing may be left: no process of an earlier start,
no unfinished checkpoint, no temporary file.
Asked: equal losses; the others end within 15 s; training again within 25 s of a kill.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from report import table

PROCESSES, DEVICES = 2, 2  # of a process
ROWS, WIDTH, LAYERS, EVERY, MARGIN = 48, 256, 4, 5, 10
SETTINGS = {"MESHWRIGHT_MEASURE": "never", "JAX_PLATFORMS": "cpu"}
SETTINGS |= {"PYTHONDONTWRITEBYTECODE": ""}  # or each start compiles what it imports; installed packages are compiled
STARTING = ("planning", "restoring", "compiling")  # phases of a run that was disturbed just before
PHASES = ("saving", "saving", "stepping", *STARTING)
FAULTS = ("kill", "stop", "kill", "disk")
DISK_MB = 32  # of the disk that is filled
# How long after a phase began a fault may come, so that it is often not over yet.
LATEST_S = {"stepping": 1.0, "saving": 0.1, "planning": 1.0, "restoring": 0.2, "compiling": 0.5}
HANG_S = 300
ROUNDING = 2e-5  # of losses, relative


def train(folder, restore, save, stop=None, stages=0):
    """The run: marks its phases, records every loss, and ends at the step that the file `stop` holds."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import meshwright as mw

    process, folder = jax.process_index(), Path(folder)
    past = []  # the phases of this start, with the clock and the CPU time at their beginnings

    def mark(phase):
        past.append((phase, time.time(), time.process_time()))
        devices = jax.device_count()
        (folder / f"new{process}").write_text(json.dumps([os.getpid(), phase, jax.process_count(), devices, past[:5]]))
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

    mark("planning")
    train_step = mw.parallelize(step, method=mw.ThreeD(pipeline=stages, microbatch=8) if stages else None)
    key = jax.random.key(0)
    train_step.plan(jax.eval_shape(init, key), sample(0))
    assert len(train_step.last_plan.stages) == stages
    mark("restoring")
    start, params = restore(train_step) or (0, mw.create_state(init, key, like=train_step))
    jax.block_until_ready([x for x in params if x.addressable_shards])
    mark("compiling")
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


class Disturber:
    """Disturbs a run whose marks it reads, and notes how long the others and the resumption took."""

    def __init__(self, engine, folder, seed, has_disk):
        self.engine, self.folder, self.random, self.has_disk = engine, Path(folder), random.Random(seed), has_disk
        self.rows, self.parts = [], []
        self.began = set()  # all processes that were seen

    def marks(self):
        found = {p: _read(self.folder / f"mark{p}") for p in range(8)}
        found = {p: mark for p, mark in found.items() if mark is not None and _is_alive(mark[0])}
        self.began |= {mark[0] for mark in found.values()}
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

    def all_faults(self, number):
        """Disturbs the run so often; a phase of its start is met after a fault that was not waited for."""
        faults = self.random.choices(FAULTS if self.has_disk else FAULTS[:2], k=number)
        phases = self.random.choices(PHASES, k=number)
        for i, (fault, phase) in enumerate(zip(faults, phases, strict=True)):
            self.disturb(fault, phase, i + 1 == number or phases[i + 1] not in STARTING)

    def disturb(self, fault, phase, is_awaited):
        if phase not in STARTING:
            self.wait("the run to step", lambda: {mark[1] for mark in self.marks().values()} == {"stepping"})
            began = len(self.losses())
            self.wait("some steps", lambda: len(self.losses()) >= began + 2 * EVERY)
        victim = 0 if self.random.random() < 0.4 else self.random.randrange(1, PROCESSES)
        marks = self.wait(f"a process that is {phase}", lambda: self._in_phase(phase, victim))
        time.sleep(self.random.random() * LATEST_S[phase])
        then, while_ = time.time(), (_read(self.folder / f"mark{victim}") or marks[victim])[1]
        filler = self.folder / "checkpoints" / "filler"
        others = set(marks) - {victim} if fault == "kill" else set(marks)
        if fault == "disk":
            fill(filler)
        else:
            os.kill(marks[victim][0], signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        self.wait("the others to end", lambda: not any(_is_alive(marks[p][0]) for p in others))
        ended = time.time() - then
        filler.unlink(missing_ok=True)
        who = "process 0" if victim == 0 else "a worker"
        what = {"kill": f"{who} is killed", "stop": f"{who} is stopped", "disk": "the disk is full"}[fault]
        if is_awaited:
            self.note(what, while_, ended, then, lambda row: row[2] != marks[0][0])
        else:
            self.rows.append((self.engine, what, while_, f"{ended:.1f} s", "disturbed again before", "", "", ""))
        print(*self.rows[-1], sep=" | ", file=sys.stderr, flush=True)

    def _in_phase(self, phase, victim):
        marks = self.marks()
        return marks if victim in marks and marks[victim][1] == phase else None

    def note(self, what, phase, ended, then, is_new):
        """Waits until a run records a loss that is new after some moment, and adds a row."""
        row = self.wait("the run to continue", lambda: next((r for r in self.losses() if r[4] > then and is_new(r)), 0))
        past = self.wait("process 0's marks", lambda: self._past(row[2]))
        cells = ("–" if ended is None else f"{ended:.1f} s", f"{row[4] - then:.1f} s", f"{past[3][2]:.1f} s")
        self.rows.append((self.engine, what, phase, *cells, row[3], row[0]))
        start = _started(row[2])
        if ended is not None and start is not None:
            walls = [then, then + ended, start, *(mark[1] for mark in past)]
            self.parts.append((walls, [mark[2] for mark in past]))

    def _past(self, process):
        mark = _read(self.folder / "mark0")
        return mark[4][:4] if mark is not None and mark[0] == process and len(mark[4]) >= 4 else None

    def stop(self):
        (self.folder / "stop").write_text(str(self.losses()[-1][0] + MARGIN))

    def check_nothing_is_left(self):
        """Whatever the disturbed starts had is gone: processes, unfinished checkpoints, temporary files."""
        alive = [p for p in self.began if _is_alive(p)]
        steps = [p.name for p in (self.folder / "checkpoints").rglob("*") if "tmp" in p.name]
        files = [str(path) for path in (self.folder / "tmp").iterdir()]
        assert not alive and not steps and not files, (alive, steps, files)


def fill(path):
    """Fills the disk that a file is on."""
    with contextlib.suppress(OSError), path.open("wb") as file:
        while True:
            file.write(bytes(2**16))
            file.flush()


def _is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _started(process):
    """When a process began, by the clock."""
    try:
        ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - since_boot


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


def run_launch(disturber, faults, stages=0):
    folder = disturber.folder
    command = [sys.executable, "-m", "meshwright", "launch", "--processes", str(PROCESSES)]
    command += ["--devices-per-process", str(stages // PROCESSES or DEVICES), "--restarts", str(10 * faults)]
    command += [__file__, "--child", str(folder), "--stages", str(stages)]
    with open(folder / "output", "w") as output:
        run = subprocess.Popen(
            command, env=os.environ | SETTINGS | {"TMPDIR": str(folder / "tmp")}, stdout=output, stderr=output
        )
        try:
            disturber.all_faults(faults)
            disturber.stop()
            assert run.wait(HANG_S) == 0, (folder / "output").read_text()[-3000:]
        finally:
            run.kill()


def run_ray(disturber, faults, nodes):
    os.environ |= SETTINGS | {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "20"  # for workers on a node whose loss is not known yet
    import ray
    import ray.train
    from ray.cluster_utils import Cluster

    import meshwright.ray

    patience = {"raylet_start_wait_time_s": 120}  # of a busy machine
    scratch = {"runtime_env": {"env_vars": {"TMPDIR": str(disturber.folder / "tmp")}}, "log_to_driver": False}
    if nodes:
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": patience}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        hosts = [cluster.add_node(num_cpus=1, include_dashboard=False) for _ in range(PROCESSES)]
        ray.init(address=cluster.address, **scratch)
    else:
        ray.init("local", num_cpus=PROCESSES, include_dashboard=False, _system_config=patience, **scratch)
    trainer = meshwright.ray.Trainer(
        under_ray,
        ray.train.ScalingConfig(num_workers=(1, PROCESSES), elastic_resize_monitor_interval_s=2),
        ray.train.RunConfig(
            name="kills",
            storage_path=f"{disturber.folder}/checkpoints",
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=3),
        ),
        train_loop_config={"folder": str(disturber.folder)},
        devices_per_worker=DEVICES,
    )
    outcome = []
    training = threading.Thread(target=lambda: outcome.append(trainer.fit()), daemon=True)
    training.start()
    try:
        disturber.all_faults(faults)
        if nodes:
            then = time.time()
            cluster.remove_node(hosts.pop(), allow_graceful=False)
            disturber.note("a node is lost", "stepping", None, then, lambda row: row[3] == DEVICES)
            then = time.time()
            hosts.append(cluster.add_node(num_cpus=1, include_dashboard=False))
            disturber.note("a node is added", "stepping", None, then, lambda row: row[3] == PROCESSES * DEVICES)
        disturber.stop()
        training.join(HANG_S)
        assert outcome and outcome[0].error is None, outcome
    finally:
        ray.shutdown()
        if nodes:
            cluster.shutdown()


def check_losses(disturber):
    """The greatest difference of any loss from the undisturbed run's, relative."""
    folder = disturber.folder / "undisturbed"
    folder.mkdir()
    steps = 1 + max(row[0] for row in disturber.losses())
    settings = SETTINGS | {"JAX_NUM_CPU_DEVICES": str(PROCESSES * DEVICES)}
    command = [sys.executable, __file__, "--undisturbed", str(steps), "--child", str(folder)]
    subprocess.run(command, check=True, env=os.environ | settings, stderr=subprocess.DEVNULL)
    right = {row[0]: row[1] for row in Disturber("", folder, 0, has_disk=False).losses()}
    worst = max(abs(loss / right[number] - 1) for number, loss, *_ in disturber.losses())
    assert worst <= ROUNDING and sorted(right) == sorted({row[0] for row in disturber.losses()}), worst
    return worst, steps


def parts_of(engine, parts):
    """Rows that say where the time from a kill to the first new step goes: medians, by the clock and of process 0."""
    names = ("the others end", "a process is started", "imports, meeting", "planning", "restoring", "first step")
    walls = [[later - before for before, later in pairwise(moments)] for moments, _ in parts]
    clocks = [[c[0], *(later - before for before, later in pairwise(c))] for _, c in parts]
    cells = zip(names, _medians(walls), [None, None, *_medians(clocks)], strict=True)
    return [(engine, name, f"{wall:.1f} s", "" if cpu is None else f"{cpu:.1f} s") for name, wall, cpu in cells]


def _medians(rows):
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=["ray", "launch", "stages"], default="launch")
    parser.add_argument("--faults", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", action="store_true", help="a node of Ray's cluster is removed, and one is added")
    parser.add_argument("--rows", type=Path, help="a file with the rows of earlier runs, to which this one's are added")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--stages", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--undisturbed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.undisturbed:
        return train(options.child, lambda like: None, None, options.undisturbed)
    if options.child:
        return under_launch(options.child, options.stages)
    rows, said, parts = [], [], {}
    if options.rows and options.rows.exists():
        rows, said, parts = json.loads(options.rows.read_text())
    runs = {"launch": run_launch, "stages": partial(run_launch, stages=2), "ray": partial(run_ray, nodes=options.nodes)}
    with tempfile.TemporaryDirectory() as folder, small_disk(f"{folder}/checkpoints") as has_disk:
        Path(folder, "tmp").mkdir()
        disturber = Disturber(options.engine, folder, options.seed, has_disk)
        runs[options.engine](disturber, options.faults)
        disturber.check_nothing_is_left()
        worst, steps = check_losses(disturber)
        load = os.getloadavg()[2]
    rows += disturber.rows
    parts.setdefault(options.engine, []).extend(disturber.parts)
    difference = f"losses within {worst:.1e} of the undisturbed run's"
    said.append(f"{options.engine}: {len(disturber.rows)} faults, {steps} steps, {difference}, load {load:.0f}")
    if options.rows:
        options.rows.write_text(json.dumps([rows, said, parts]))
    header = ("engine", "fault", "while", "others end after", "trains again after", "CPU", "devices", "from step")
    table("Kills", f"{__doc__}\n{'; '.join(said)}.", header, rows)
    where = "Where does the time go from a fault to the first new step? Medians of `python benchmarks/kills.py`."
    spent = [row for engine, own in parts.items() if own for row in parts_of(engine, own)]
    table("Kills by parts", where, ("engine", "part", "clock", "CPU of process 0"), spent)
    return None


if __name__ == "__main__":
    main()
