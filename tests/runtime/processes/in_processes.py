"""What `test_processes.py` runs in one process of eight devices, and as a script in two processes of four.

Usage: in_processes.py PROCESS PORT DIRECTORY
"""

import json
import os
import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np

import meshwright as mw
from meshwright import zoo

CLUSTER = "2x4 cpu"


def parts(batches):
    """This process's rows of each batch, as a loader of its own would give them."""
    for batch in batches:
        yield jax.tree.map(_part, batch)


def _part(array):
    """A process's share of the rows; what has no rows is the same for all."""
    if not array.shape:
        return np.asarray(array)
    rows = len(array) // jax.process_count()
    start = jax.process_index() * rows
    return np.asarray(array)[start : start + rows]


def train_a_created_state(directory):
    """A state that is born in parts, saved and restored on the way."""
    example = zoo.build("mlp", batch=16, hidden=32, layers=2)
    step = mw.parallelize(example.train_step, cluster=CLUSTER, method=mw.Zero(stage=3))
    state = mw.create_state(example.init, jax.random.key(0), like=step, example=(example.batch,))
    losses = []
    for i, batch in enumerate(mw.batches(parts(example.sample(i) for i in range(4)), step)):
        state, loss = step(state, batch)
        losses.append(float(loss))
        if i in (0, 2):
            mw.save(directory, i, state, keep=1, wait=False)
        if i == 2:
            state = mw.restore(directory, like=step)
    kept = sorted(name for name in os.listdir(directory) if name.isdecimal())
    return {"losses": losses, "plans": len(step.plans), "kept": kept}


def train_a_state_from_the_host(directory):
    """Whatever a user might have in a state; a mesh that wants the batch's rows elsewhere; a smaller last batch."""

    def step(state, batch):
        noise = batch["scale"] * jax.random.normal(state["key"], batch["x"].shape)
        loss = lambda w: jnp.mean((jnp.tanh((batch["x"] + noise) @ w) @ w.T - batch["x"]) ** 2)  # noqa: E731
        value, grad = jax.value_and_grad(loss)(state["w"])
        new = {"w": state["w"] - 0.1 * grad, "key": jax.random.fold_in(state["key"], 1), "n": state["n"] + 1}
        return new, {"loss": value, "rows": batch["x"].sum(axis=1)}

    rng = np.random.default_rng(0)
    sizes = (16, 16, 16, 12)
    given = [{"x": rng.normal(size=(size, 8)).astype("f4"), "scale": np.float32(0.01)} for size in sizes]
    method = mw.Auto(fix={"batch/x": jax.P("y")}, mesh_shapes=[(2, 4)])
    many = mw.parallelize(step, cluster=CLUSTER, method=method)
    state = {"w": jnp.asarray(rng.normal(size=(8, 4)), jnp.float32), "key": jax.random.key(1), "n": 0}
    numbers = []
    for i, batch in enumerate(mw.batches(parts(given), many)):
        state, metrics = many(state, batch)
        whole = jax.experimental.multihost_utils.process_allgather(metrics["rows"], tiled=True)
        numbers += [float(metrics["loss"]), float(whole[5])]
        if i == 1:
            mw.save(directory, i, state)
            plans = len(many.plans)
            state = mw.restore(directory, like=many)
            assert state["n"].weak_type
    return {"numbers": numbers, "n": int(state["n"]), "plans": len(many.plans) - plans}


def failed_save(directory):
    """What the processes are told when the second cannot write its part, and whether they can save again."""
    sharding = jax.sharding.NamedSharding(jax.make_mesh((8,), ("x",)), jax.P("x"))
    values = np.random.default_rng(0).normal(size=200_000).astype("f4")
    state = {"w": jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])}
    mw.save(directory, 1, state)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if jax.process_index() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    saving = mw.save(directory, 2, state, wait=False)
    told = _error(saving.wait)
    left = sorted(os.listdir(directory)) if jax.process_index() == 0 else None  # the first process clears it
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    mw.save(directory, 3, state)
    return {"told": told, "left": left, "steps": mw.saved_steps(directory)}


def refusals():
    """What goes wrong in several processes, said in all of them."""
    first = jax.process_index() == 0

    def step(w, x):
        value, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - grad, value

    def planned(rows, cluster=CLUSTER, method=None, ask="plan"):
        many = mw.parallelize(step, cluster=cluster, method=method)
        return getattr(many, ask)(w, jax.ShapeDtypeStruct((rows, 8), "float32"))

    w = jax.ShapeDtypeStruct((8, 8), "float32")
    unlike = np.full((16, 8), jax.process_index(), np.float32)
    return {
        "types": _error(lambda: planned(16 if first else 8)),
        "values": _error(lambda: mw.parallelize(step, cluster=CLUSTER)(np.ones((8, 8), np.float32), unlike)),
        "fails": _error(lambda: planned(3, method=mw.DataParallel())),
        "fewer": _error(lambda: planned(16, "1x4 cpu", ask="lower")),
        "more": _error(lambda: planned(16, "4x4 cpu", ask="lower")),
        "method": planned(16, method=mw.Zero() if first else mw.Auto()).method,
    }


def disagreements():
    """Batches that the processes do not have alike: what each of them is told, and how many it got before."""
    first = jax.process_index() == 0
    many = mw.parallelize(lambda w, x: (w + x.sum(), x.max()), cluster=CLUSTER, method=mw.DataParallel())

    def run(loader):
        taken = []
        w = np.float32(0)

        def loop(w):
            for x in mw.batches(loader, many):
                taken.append(1)
                w, _ = many(w, x)

        return [_error(lambda: loop(w), Exception), len(taken)]

    def fails():
        yield from batch(3)
        raise OSError("no such file")

    def batch(count, rows=4):
        return [np.ones((rows, 2), np.float32)] * count

    return {
        "fewer": run(batch(5 if first else 3)),
        "more": run(batch(3 if first else 5)),
        "parts": run(batch(3) + batch(1, 4 if first else 3)),
        "loader": run(batch(5) if first else fails()),
        "first": run(fails() if first else batch(5)),
        "well": run(batch(4)),
    }


def measured(directory):
    """The devices of all processes, measured by them together; the file of the first one is enough the next time."""
    from meshwright.profiler import local, measure, probes

    sizes = probes.Sizes((8,), (2**10,), (2**10, 2**12), (1, 8), 1)
    measure.probes = lambda machine: [p for p in probes.probes(machine, sizes) if p.what in ("launch", "all_reduce")]
    measure.MOST_TRIPS = 2
    os.environ |= {"MESHWRIGHT_MEASURE": "once", "MESHWRIGHT_CACHE": f"{directory}/{jax.process_index()}"}
    step = mw.parallelize(lambda w, x: (w, (x @ w).sum()))
    plan = step.plan(jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((16, 8), "float32"))
    first = mw.cluster("local").to_json()
    local._known.clear()
    measure.measure = None  # calling it would fail
    again = mw.cluster("local").to_json()
    local._known.clear()
    local.MEET_S = 1.0
    alone = _error(lambda: mw.cluster("local")) if jax.process_index() == 0 else ""
    os.environ["MESHWRIGHT_MEASURE"] = "never"
    files = os.listdir(directory)
    return {"first": first, "again": again, "alone": alone, "costs": plan.provenance["costs"], "files": files}


def _error(function, kind=mw.MeshwrightError):
    try:
        function()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


if __name__ == "__main__":
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[1]))
    results = {
        "created": train_a_created_state(f"{sys.argv[3]}/created"),
        "host": train_a_state_from_the_host(f"{sys.argv[3]}/host"),
        "failed_save": failed_save(f"{sys.argv[3]}/failed"),
        "measured": measured(f"{sys.argv[3]}/machine"),
        "refusals": refusals(),
        "disagreements": disagreements(),
    }
    print("RESULT " + json.dumps(results))
