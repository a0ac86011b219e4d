"""How far is a range of layers, split as a solve of the whole model says, from a solve of its own?

A range's own problem is the whole model's with nodes and edges counted in the range alone; what comes from other stages
may come in any sharding, so its optimum is a bound. On every view the search takes the better of two solves of the
whole model: for a single microbatch, and for many, of which what is done once a step is a small part.
"""

import sys
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.graph import trace
from meshwright.pipeline.catalogue import FREE, STEADY, WAYS, submesh
from meshwright.pipeline.flow import Flow
from meshwright.pipeline.layers import Wishes, find_layers
from meshwright.pipeline.prices import Pricing
from meshwright.pipeline.rows import Rows
from meshwright.pipeline.steady import Edges, steady_costs, steady_problem
from meshwright.planner.formulate import Formulation
from meshwright.planner.groups import Grouping
from meshwright.planner.methods import Auto
from meshwright.planner.priced import Usage, choice_problem
from meshwright.planner.roles import find_roles
from meshwright.solver import solve

MODELS = [
    # model, cluster, views, rows of a replica, options of the zoo
    ("llama2-13b", "8x8 h100", [(2,), (8,), (2, 4)], 2, {}),
    ("alpa-gpt-39b", "8x8 v100-16gb", [(8,), (2, 4)], 2, {"dtype": "float16"}),
    ("mixtral-8x7b", "2x8 h100", [(8,), (2, 4)], 4, {"layers": 8}),
    ("wide-resnet-1b", "2x4 a100-40gb", [(4,), (2, 2)], 32, {}),
]
MANY = 16  # microbatches
PARTS = 4  # a range is so large a part of the model


class Problem:
    """One model on one view with some microbatches; what is done once a step counts for its share."""

    def __init__(self, pricing: Pricing, formulation: Formulation, num_microbatches: int):
        self.formulation, self.layers = formulation, pricing.layers
        self.costs, self.edges = steady_costs(formulation, pricing.ends, 1 / num_microbatches)
        self.unit = pricing.units(formulation.folded)

    def part(self, first: int, last: int) -> tuple[list[float], Edges]:
        """How often each node and each edge is in a range of layers."""
        folded, layers = self.formulation.folded, self.layers
        overlap = np.minimum(last, layers.first + layers.count) - np.maximum(first, layers.first)
        share = (np.clip(overlap, 0, None) / layers.count)[self.unit]
        node = np.array([*folded.group_class, *folded.shared_class])
        nodes = np.bincount(node, share, len(self.formulation.copies))
        made, read = share[folded.untied.source], share[folded.untied.reader]
        inside = np.bincount(folded.untied.which, np.where(made > 0, read, 0.0), len(self.edges))
        counted = zip(self.edges.items(), inside.tolist(), strict=True)
        return nodes.tolist(), {key: (number, matrix) for (key, (_, matrix)), number in counted if number}

    def cost(self, choice: np.ndarray, nodes: list[float], edges: Edges) -> float:
        """Seconds of a choice in a range."""
        own = sum(n * cost[choice[i]] for i, (n, cost) in enumerate(zip(nodes, self.costs, strict=True)))
        return own + sum(n * m[choice[s], choice[r]] for (s, _, r, _), (n, m) in edges.items())


def rows_of(model: str, where: str, views: list[tuple[int, ...]], num_rows: int, options: dict) -> list[tuple]:
    """Rows of the table: for each view and range the time as planned and as solved by itself."""
    example = zoo.build(model, batch=num_rows, **options)
    traced = trace(example.train_step, example.state, example.batch)
    layers = find_layers(Flow(traced.graph, Grouping(traced.graph).nests, find_roles(traced.graph)), Wishes())
    pricing = Pricing(Rows(traced).at(num_rows), layers)
    size, end = max(layers.num_layers // PARTS, 1), layers.num_layers
    ranges = {"first": (0, size), "middle": (end // 2, end // 2 + size), "last": (end - size, end)}
    found = []
    for view in views:
        formulation = pricing.formulate(submesh(mw.cluster(where), prod(view)).mesh(view), Auto())
        choices = [solve(steady_problem(formulation, pricing.ends, WAYS[way].once)).choice for way in (FREE, STEADY)]
        for count in (1, MANY):
            problem, gaps = Problem(pricing, formulation, count), []
            for first, last in ranges.values():
                nodes, edges = problem.part(first, last)
                alone = solve(choice_problem(nodes, problem.costs, edges, Usage(0), {}, None)).choice
                least = problem.cost(alone, nodes, edges)
                free, steady = (problem.cost(choice, nodes, edges) / least - 1 for choice in choices)
                gaps += [f"{free:+.2%}", f"{min(free, steady):+.2%}"]
            found.append((model, where, "×".join(map(str, view)), count, *gaps))
            print(*found[-1], flush=True)
    return found


def main() -> None:
    rows = [row for job in MODELS for row in rows_of(*job)]
    columns = [f"{name} {what}" for name in ("first", "middle", "last") for what in ("", "of both")]
    header = ("model", "cluster", "view", "microbatches", *(name.strip() for name in columns))
    table("Ranges", __doc__ or "", header, rows)


if __name__ == "__main__":
    main()
