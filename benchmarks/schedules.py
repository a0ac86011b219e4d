"""Are ZB-V and a bidirectional schedule worth more than 2% of a step on published rows with pipelines?

Each row's recipe is priced as `meshwright validate` prices it, layer by layer, and its passes are put in time by each
schedule: 1F1B, interleaved (as published, or with the chunks that are fastest and divide the layers), ZB-H1, ZB-V
(two chunks a stage, the second on the way back; weights' gradients apart) and, in the manner of DualPipe, microbatches
from both ends, which needs all parameters twice and an exchange of their gradients. Sends take their time and are not
in the way of compute. `gain` is what the best of the two new ones saves of a step of the best of the others that fit in
memory, where it fits, too. The new ones are put in order by the real times of the passes, stage by stage. No schedule
is faster than the busiest stage without any wait.

    python benchmarks/schedules.py [published.csv]
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parent))

from report import table

from meshwright.cost.rates import step_rates
from meshwright.schedules import table as rows_of
from meshwright.simulator.lanes import run
from meshwright.simulator.transformer import memory
from meshwright.simulator.transformer.exchange import Exchange
from meshwright.simulator.transformer.layer import Layer
from meshwright.simulator.transformer.recipe import Recipe
from meshwright.simulator.transformer.work import recipe_work
from meshwright.validation.replay import read_rows
from meshwright.validation.row import RowError, recipe_of

Operation = tuple[str, int, int, int]  # the work, the place in the model, the microbatch, the direction
ROWS = Path(os.environ.get("MESHWRIGHT_DATA", "shared/data")) / "published.csv"
F, B, W = "forward", "backward", "weights"


class Times:
    """Seconds of a row's passes, by how many places the layers are cut into."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        rates = step_rates(recipe.cluster.chip)
        layer = Layer(recipe, rates)
        kernels = [*layer.attention_block(), *layer.feed_forward_block()]
        self.weights_s = sum(kernel.weights_s for kernel in kernels)  # of a layer
        work = recipe_work(recipe, "row")
        per_layer = recipe.shape.layers / len(work.chunks)
        middle = work.chunks[len(work.chunks) // 2] if len(work.chunks) > 2 else work.chunks[0]
        self.layer_s = [run(tasks, work.contention).end_s / per_layer for tasks in (middle.forward, middle.backward)]
        ends = [work.chunks[0], work.chunks[-1]]
        self.extra_s = [
            [max(0.0, run(t, work.contention).end_s - s * per_layer) for t, s in zip(pair, self.layer_s, strict=True)]
            for pair in ((end.forward, end.backward) for end in ends)
        ]
        self.send_s = max(chunk.send_s for chunk in work.chunks)
        self.once_s = max(run(tasks, work.contention).end_s for tasks in work.update)
        # Stages at both ends send each other the gradients of the layers that both have.
        exchange = Exchange(recipe.cluster, rates.constants.network)
        copied = recipe.stack.gradient_bytes * memory.stage_params(recipe, 0)
        self.copies_s = exchange.send_s(0, recipe.cluster.num_devices // recipe.pipeline, copied)
        self.layer_bytes = memory.layer_bytes(recipe)
        self.state_bytes = max(work.state_bytes)
        self.limit_bytes = recipe.cluster.memory_bytes

    def of(self, kind: str, place: int, places: int, apart: bool) -> float:
        """Seconds of a pass over a place's layers."""
        layers = self.recipe.shape.layers / places
        extra = self.extra_s[place == places - 1] if place in (0, places - 1) else [0.0, 0.0]
        weights = self.weights_s * layers
        if kind == F:
            return self.layer_s[0] * layers + extra[0]
        if kind == W:
            return weights
        return self.layer_s[1] * layers + extra[1] - (weights if apart else 0.0)


def played(lists: list[list[Operation]], times: Times, places: int) -> float:
    """Seconds until all stages have carried out their operations, each in its order."""
    apart = any(one[0] == W for own in lists for one in own)
    ends: dict[Operation, float] = {}
    clock, at = [0.0] * len(lists), [0] * len(lists)
    moving = True
    while moving:
        moving = False
        for s, own in enumerate(lists):
            while at[s] < len(own):
                kind, v, i, d = own[at[s]]
                before: list[Operation] = []
                if kind == F:
                    before = [(F, v - 1, i, d)] if v else []
                elif kind == B:
                    before = [(F, v, i, d)] + ([(B, v + 1, i, d)] if v < places - 1 else [])
                if not all(one in ends for one in before):
                    break
                sends = [ends[one] + times.send_s * (one[1] != v) for one in before]
                clock[s] = max([clock[s], *sends]) + times.of(kind, v, places, apart)
                ends[kind, v, i, d] = clock[s]
                at[s] += 1
                moving = True
    assert all(a == len(own) for a, own in zip(at, lists, strict=True)), "a schedule that waits for ever"
    return max(clock)


def fastest(p: int, m: int, both: bool, times: Times) -> float:
    """The best of some rules by which a stage chooses among passes that are ready; seconds."""
    kinds = ((B, F, W), (F, B, W))
    found = min(greedy(p, m, both, times, order, ahead) for order in kinds for ahead in (False, True))
    return found + both * times.copies_s


def greedy(p: int, m: int, both: bool, times: Times, kinds: Sequence[str], ahead: bool) -> float:
    """Seconds of ZB-V, or with ``both`` of microbatches from both ends: whoever is free takes what is ready.

    Passes are taken in the order of ``kinds``, and of their places in the model, with ``ahead`` the first ones first. A
    stage begins a microbatch while it holds fewer than 1F1B does: on its first stage for ZB-V, and as many as each
    direction would hold for itself for the other.
    """
    places = p if both else 2 * p
    own = [[(s, 0), (p - 1 - s, 1)] if both else [(2 * p - 1 - s, 0), (s, 0)] for s in range(p)]
    counts = (m - m // 2, m // 2) if both else (m,)
    stage_of = {pair: s for s, pairs in enumerate(own) for pair in pairs}
    arrives: dict[Operation, float] = {}  # when an operation is possible
    for d, count in enumerate(counts):
        arrives |= {(F, 0, i, d): 0.0 for i in range(count)}
    number: Counter[tuple[str, int, int]] = Counter()  # the next microbatch of a pass
    free = [0.0] * p
    moments = [(0.0, s) for s in range(p)]
    left = 3 * places * sum(counts)

    def ready(s: int, now: float) -> Iterator[Operation]:
        for kind in kinds:
            for v, d in own[s][:: -1 if ahead else 1]:
                one = (kind, v, number[kind, v, d], d)
                begins, limit = both or v < p, p - v if both else p
                if kind == F and begins and one[2] - number[W, v, d] >= limit:
                    continue
                if arrives.get(one, now + 1) <= now:
                    yield one

    while left:
        now, s = heappop(moments)
        if free[s] > now or (one := next(ready(s, now), None)) is None:
            continue
        kind, v, i, d = one
        end = free[s] = now + times.of(kind, v, places, True)
        number[kind, v, d] += 1
        left -= 1
        following = {F: (F, v + 1, i, d) if v < places - 1 else (B, v, i, d), B: (B, v - 1, i, d), W: None}[kind]
        if kind == B:
            arrives[W, v, i, d] = end
        if following is not None and following[1] >= 0:
            other = stage_of[following[1], d]
            arrives[following] = end + times.send_s * (other != s)
            heappush(moments, (arrives[following], other))
        heappush(moments, (end, s))
    return max(free)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    rows, gains = [], []
    for row in read_rows(path):
        try:
            recipe = recipe_of(row)
        except RowError:
            continue
        if recipe.pipeline == 1 or recipe.num_microbatches < 2:
            continue
        times, p, m = Times(recipe), recipe.pipeline, recipe.num_microbatches
        layers = recipe.shape.layers
        found: dict[str, float] = {}
        held: dict[str, float] = {}
        for name in ("1f1b", "zb-h1"):
            held[name] = p * layers / p * times.layer_bytes
            lists = [[(s.work, number, s.microbatch, 0) for s in own] for number, own in enumerate(rows_of(name, p, m))]
            found[name] = played(lists, times, p)
        for v in range(2, layers // p + 1):
            if m % p or layers % (p * v):
                continue
            lists = [
                [(s.work, s.chunk * p + n, s.microbatch, 0) for s in own]
                for n, own in enumerate(rows_of("interleaved", p, m, v))
            ]
            held[f"interleaved {v}"] = (1 + (p - 1) / (p * v)) * layers * times.layer_bytes
            found[f"interleaved {v}"] = played(lists, times, p * v)
        new = {}
        if layers >= 2 * p:
            new["zb-v"] = fastest(p, m, False, times)
            held["zb-v"] = layers * times.layer_bytes
        new["both ends"] = fastest(p, m, True, times)
        held["both ends"] = layers * times.layer_bytes + times.state_bytes  # an upper bound: parameters twice
        fits = {n for n in held if held[n] + times.state_bytes <= times.limit_bytes} or {"1f1b"}
        before = min((s, n) for n, s in found.items() if n in fits or n == "1f1b")
        after = min(((s, n) for n, s in new.items() if n in fits), default=None)
        gain = 1 - (after[0] + times.once_s) / (before[0] + times.once_s) if after else 0.0
        gains.append(gain)
        busiest = max(m * (times.of(F, v, p, False) + times.of(B, v, p, False)) for v in range(p))
        published = f"interleaved {recipe.interleave}" if recipe.interleave > 1 else "1f1b"
        cells = [f"{found.get(published, float('nan')):.3f}", f"{before[0]:.3f} ({before[1]})"]
        cells += [
            f"{new[n]:.3f}{'' if n in fits else ' (does not fit)'}" if n in new else "–" for n in ("zb-v", "both ends")
        ]
        rows.append((row.id, f"{p} stages, {m}", *cells, f"{busiest:.3f}", f"{gain:+.1%}"))
        print(rows[-1], flush=True)
    rows.append(("mean", *[""] * 6, f"{mean(gains):+.1%}"))
    rows.append(("rows with more than 2%", *[""] * 6, f"{sum(g > 0.02 for g in gains)} of {len(gains)}"))
    header = (
        "row",
        "microbatches",
        "as published, s",
        "best that there is, s",
        "ZB-V, s",
        "both ends, s",
        "busiest stage alone, s",
        "gain",
    )
    table("Schedules", __doc__ or "", header, rows)


if __name__ == "__main__":
    main()
