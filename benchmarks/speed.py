"""How fast is what Auto runs, against shardings that an expert writes by hand?

On 8 virtual CPU devices, everything in one process. Each model's train step is run as `mw.parallelize` plans it and as
plain `jax.jit` with shardings written by hand: data parallel, FSDP, Megatron's tensor parallel (expert parallel for the
mixture of experts) and data × tensor on a 2-D mesh. The programs take turns, so that whatever else the machine does
hits all of them; a time is the median over all turns, and the ratio is the median of the turns' own ratios, which
drift spoils least. Asked for: at most 1.03 of the best by hand. The last column is the same ratio in processor time:
it leaves out waiting, for other programs as for other devices.

The second table: what a call of the parallelised function costs over the bare compiled program on a step of about 1 ms
(asked: 1.05). The third: processor time to trace, lower and compile, against the best program by hand (asked: 1.3);
planning comes on top.

    python benchmarks/speed.py [MODEL …] [--turns 30]
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.zoo import train

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt-tiny", {"batch": 16, "seq": 64, "hidden": 256, "heads": 8, "layers": 2, "dtype": "float32"}),
    "moe": (
        "moe-tiny",
        {"batch": 16, "seq": 64, "hidden": 128, "heads": 8, "ffn": 512, "experts": 8, "dtype": "float32"},
    ),
    "wide-resnet": ("wide-resnet-tiny", {"batch": 16, "channels": 16, "dtype": "float32"}),
    "mlp": ("mlp", {"batch": 256, "hidden": 512, "layers": 4}),
}

Tree = Any


@dataclass(frozen=True)
class Hand:
    """Shardings of one way to write a step by hand.

    Attributes:
        shape: Sizes of the mesh's axes, ``d`` (data) and ``t`` (tensor).
        spec: The sharding of a parameter, from its path and shape; both moments follow it.
    """

    name: str
    shape: tuple[int, int]
    spec: Callable[[str, tuple[int, ...]], P]

    def mesh(self) -> Any:
        kinds = (jax.sharding.AxisType.Auto,) * 2
        return jax.make_mesh(self.shape, ("d", "t"), axis_types=kinds)

    def step(self, example: zoo.Example) -> Any:
        """The train step, jitted with these shardings."""
        mesh = self.mesh()
        named = jax.tree_util.tree_map_with_path(lambda p, x: self.sharding(mesh, p, x), example.state)
        batch = jax.tree.map(lambda x: NamedSharding(mesh, P("d")), example.batch)
        optimizer = train.AdamW(weight_decay=0.0, clip_norm=None) if example.name == "mlp" else train.AdamW()

        def step(state: Tree, batch: Tree) -> Any:
            value, grads = jax.value_and_grad(example.loss)(state["params"], batch)
            # Gradients where the parameters are: a reduce-scatter for FSDP, nothing new for the others.
            grads = jax.lax.with_sharding_constraint(grads, named["params"])
            if optimizer.clip_norm is not None:
                grads = train.clip_by_global_norm(grads, optimizer.clip_norm)
            return train.update(optimizer, state, grads), value

        whole = NamedSharding(mesh, P())
        return jax.jit(step, in_shardings=(named, batch), out_shardings=(named, whole), donate_argnums=0)

    def sharding(self, mesh: Any, path: Any, leaf: Any) -> NamedSharding:
        names = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, P() if not leaf.shape else self.spec(names, leaf.shape))


def whole(path: str, shape: tuple[int, ...]) -> P:
    return P()


def fsdp(path: str, shape: tuple[int, ...]) -> P:
    """The longest dim that eight devices share evenly."""
    even = [i for i, size in enumerate(shape) if size % 8 == 0]
    if not even or len(shape) < 2:
        return P()
    longest = max(even, key=lambda i: shape[i])
    return P(*[None] * longest, "d")


def megatron(path: str, shape: tuple[int, ...]) -> P:
    """Columns of the first product, rows of the second, heads, vocabulary; experts where there are any."""
    last = path.split("/")[-1]
    if len(shape) == 3 and last in ("up", "down"):  # of experts
        return P("t")
    rules = {
        "q": P(None, "t"),
        "k": P(None, "t"),
        "v": P(None, "t"),
        "q_bias": P("t"),
        "k_bias": P("t"),
        "v_bias": P("t"),
        "o": P("t"),
        "up": P(None, "t"),
        "up_bias": P("t"),
        "down": P("t"),
        "embed": P("t"),
        "conv1": P(None, None, None, "t"),  # 1×1, then 3×3 between them by channels, then back
        "conv2": P(None, None, None, "t"),
        "conv3": P(None, None, "t"),
    }
    if "norm1" in path or "norm2" in path:
        return P("t")
    if "kernel" in path or ("layers" in path and last == "bias" and "norm" not in path):  # of the MLP: by turns
        layer = int(path.split("/")[-2])
        return (
            P(None, "t")
            if layer % 2 == 0 and last == "kernel"
            else P("t")
            if layer % 2 == 0 or last == "kernel"
            else P()
        )
    return rules.get(last, P())


HANDS = [
    Hand("DP", (8, 1), whole),
    Hand("FSDP", (8, 1), fsdp),
    Hand("Megatron", (1, 8), megatron),
    Hand("2-D 4×2", (4, 2), megatron),
    Hand("2-D 2×4", (2, 4), megatron),
]

_MANY = 50  # turns of a step of a millisecond for one of another


@dataclass
class Runner:
    """A compiled step with its own state, run by turns with the others."""

    name: str
    call: Callable[..., Any]
    state: Tree
    batch: Tree
    compile_s: float
    times: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)  # processor seconds of all threads

    def turn(self) -> None:
        started, worked = time.perf_counter(), time.process_time()
        self.state, value = self.call(self.state, self.batch)
        jax.block_until_ready((self.state, value))
        self.times.append(time.perf_counter() - started)
        self.work.append(time.process_time() - worked)


def by_hand(hand: Hand, example: zoo.Example) -> Runner:
    step = hand.step(example)
    return runner(hand.name, step, example)


def by_auto(example: zoo.Example) -> tuple[Runner, mw.Plan]:
    step = mw.parallelize(example.train_step, cluster="local")
    plan = step.plan(example.state, example.batch)
    return runner("Auto", step, example), plan


def runner(name: str, step: Any, example: zoo.Example) -> Runner:
    started = time.process_time()
    compiled = step.lower(example.state, example.batch).compile()
    seconds = time.process_time() - started
    state, batch = jax.device_put((example.init(0), example.sample(1)), compiled.input_shardings[0])
    return Runner(name, compiled, state, batch, seconds)


def take_turns(runners: list[Runner], turns: int) -> None:
    for runner in runners:
        runner.turn()  # to warm up
        runner.times.clear()
        runner.work.clear()
    for number in range(turns):
        for runner in runners if number % 2 else runners[::-1]:
            runner.turn()


def ratio(a: list[float], b: list[float]) -> str:
    return f"{np.median(np.array(a) / np.array(b)):.3f}"


def speed_row(name: str, turns: int) -> tuple[list[str], list[str]]:
    model, options = MODELS[name]
    example = zoo.build(model, **options)
    auto, plan = by_auto(example)
    hands = [by_hand(hand, example) for hand in HANDS]
    check_losses([auto, *hands])
    take_turns([auto, *hands], turns)
    best = min(hands, key=lambda r: median(r.times))
    cells = [f"{1e3 * median(r.times):.1f}" for r in (auto, *hands)]
    mesh = "×".join(map(str, plan.mesh.sizes))
    seconds = [f"{r.compile_s:.1f}" for r in (auto, *hands)]
    compile_row = [name, *seconds, best.name, f"{auto.compile_s / best.compile_s:.2f}"]
    return [name, mesh, *cells, best.name, ratio(auto.times, best.times), ratio(auto.work, best.work)], compile_row


def check_losses(runners: list[Runner]) -> None:
    """All of them compute the same thing."""
    values = []
    for runner in runners:
        runner.state, value = runner.call(runner.state, runner.batch)
        values.append(float(value))
    np.testing.assert_allclose(values, values[0], rtol=1e-4, err_msg=str([r.name for r in runners]))


def call_row(turns: int) -> list[str]:
    """A step of a millisecond at least, called as users call it and as the bare compiled program."""
    for hidden in (16, 32, 64, 128, 256, 512):
        runners = callers(zoo.build("mlp", batch=8, hidden=hidden, layers=2))
        take_turns(runners, _MANY)
        if median(runners[1].times) >= 1e-3:
            break
    take_turns(runners, _MANY * turns)
    called, bare, jit = runners
    micro = [f"{1e6 * median(r.times):.0f}" for r in runners]
    return [f"MLP of 2 layers of {hidden}", *micro, ratio(called.times, bare.times), ratio(called.times, jit.times)]


def callers(example: zoo.Example) -> list[Runner]:
    """One step, called as users call it, as the bare compiled program, and as a `jax.jit` function."""
    step = mw.parallelize(example.train_step, cluster="local")
    compiled = step.compiled(example.state, example.batch)
    batch = jax.device_put(example.sample(1), compiled.input_shardings[0][1])
    return [
        Runner(name, call, jax.device_put(example.init(0), compiled.input_shardings[0][0]), batch, 0.0)
        for name, call in (("called", step), ("bare", compiled), ("jitted", jitted(step, example)))
    ]


def jitted(step: Any, example: zoo.Example) -> Any:
    """The same program as a `jax.jit` function: what a program written by hand would be called through."""
    step(example.init(0), example.sample(1))
    return step.recent.quick


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--turns", type=int, default=30)
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"unknown models {', '.join(sorted(unknown))}; choose from {', '.join(MODELS)}")
    found = [speed_row(name, options.turns) for name in options.models or MODELS]
    question = (__doc__ or "").split("\n")[0]
    names = [hand.name for hand in HANDS]
    table(
        "Speed",
        f"{question} Milliseconds a step; asked: Auto ÷ best ≤ 1.03.",
        ("model", "Auto's mesh", "Auto", *names, "best by hand", "Auto ÷ best", "in processor time"),
        [row for row, _ in found],
    )
    table(
        "Compile time",
        "How long does it take to compile? Processor seconds, from tracing on; asked: Auto ÷ best by hand ≤ 1.3.",
        ("model", "Auto", *names, "best by hand", "Auto ÷ best"),
        [row for _, row in found],
    )
    if not options.models:
        table(
            "Call",
            "What does a call of the parallelised function cost? Microseconds; asked: ÷ bare ≤ 1.05.",
            (
                "step",
                "train_step(state, batch)",
                "bare compiled program",
                "its jax.jit function",
                "÷ bare",
                "÷ jax.jit",
            ),
            [call_row(20 * options.turns)],
        )


if __name__ == "__main__":
    main()
