"""Choice problems shaped like folded training steps: layers of products, parameters, activations."""

import itertools

import numpy as np

from meshwright.solver.problem.problem import ChoiceProblem

_LOOPS = "bmnk"


def layered_problem(mesh=(8, 8), layers=2, repeats=20, limit_part=None, width=4096, tokens=65536, moe=False):
    """A training step of `layers` transformer layers, each standing for `repeats`, on a mesh.

    Args:
        mesh: Sizes of the axes; every node may split every loop over every axis, so strategies grow with their number.
        limit_part: The memory limit as a part of what a replicated plan would use; None for no limit.
    """
    build = _Builder(mesh, repeats)
    x = build.input(tokens, width)
    for _ in range(layers):
        q = build.product(x, tokens, width, width)
        k = build.product(x, tokens, width, width)
        v = build.product(x, tokens, width, width)
        scores = build.mix(q, k, tokens, width)
        attended = build.mix(scores, v, tokens, width)
        x = build.mix(build.product(attended, tokens, width, width), x, tokens, width)
        up = build.product(x, tokens, width, 4 * width)
        gate = build.product(x, tokens, width, 4 * width) if moe else up
        x = build.mix(build.product(build.mix(up, gate, tokens, 4 * width), tokens, 4 * width, width), x, tokens, width)
    build.product(x, tokens, width, 8 * width)
    return build.problem(limit_part)


class _Builder:
    def __init__(self, mesh, repeats):
        self.mesh, self.repeats = mesh, repeats
        self.costs, self.edges, self.rows, self.pool = [], [], [], {}
        self.clock = 0

    def input(self, tokens, width):
        plans = list(itertools.product("bmn-", repeat=len(self.mesh)))
        return self._node(plans, np.zeros(len(plans)), None, tokens * width)

    def product(self, x, tokens, inner, outer):
        """A product b m k · k n with its parameter: strategies give every axis one loop or none."""
        plans = list(itertools.product("bmnk-", repeat=len(self.mesh)))
        flops = 6 * tokens * inner * outer
        costs = []
        for plan in plans:
            split = np.prod([size for size, loop in zip(self.mesh, plan, strict=True) if loop != "-"] or [1])
            reduced = sum((size - 1) / size for size, loop in zip(self.mesh, plan, strict=True) if loop == "k")
            costs.append(flops / split / 3e14 + reduced * 4 * tokens * outer / split / 1e11)
        node = self._node(plans, np.array(costs) * self.repeats, None, tokens * outer)
        weight = self._weight(inner, outer)
        self._edge(x, node, tokens * inner, ("b", "m", "k"))
        self._edge(weight, node, 2 * inner * outer, ("k", "n"))
        return node

    def mix(self, x, y, tokens, width):
        """An elementwise operation over two inputs."""
        plans = list(itertools.product("bmn-", repeat=len(self.mesh)))
        split = np.array([self._split(plan) for plan in plans])
        node = self._node(plans, tokens * width * 6 / split / 2e12 * self.repeats, None, tokens * width)
        for source in {x, y}:
            self._edge(source, node, tokens * width, ("b", "m", "n"))
        return node

    def _split(self, plan):
        return float(np.prod([size for size, loop in zip(self.mesh, plan, strict=True) if loop != "-"] or [1]))

    def _weight(self, inner, outer):
        plans = list(itertools.product("kn-", repeat=len(self.mesh)))
        split = np.array([self._split(plan) for plan in plans])
        update = 16 * inner * outer / split / 2e12 * self.repeats
        node = self._node(plans, update, None, 0)
        self.rows.append((node, 0, 10**6, 16.0 * inner * outer / split * self.repeats))
        return node

    def _node(self, plans, costs, _, elements):
        self.costs.append((plans, costs))
        node = len(self.costs) - 1
        if elements:
            kept = np.array([self._split([loop if loop in "bmn" else "-" for loop in plan]) for plan in plans])
            self.rows.append((node, self.clock, 10**4 - self.clock, 2.0 * elements / kept * self.repeats))
            self.clock += 1
        return node

    def _edge(self, u, v, elements, loops):
        """Resharding: each axis that moves from one dim to another costs an all-to-all, that ends an all-gather."""
        first, second = self.costs[u][0], self.costs[v][0]
        key = (len(first), len(second), elements, loops)
        if key not in self.pool:
            names = dict(zip(loops, "bmn" if len(loops) == 3 else "kn", strict=True))
            matrix = np.zeros((len(first), len(second)))
            for i, j in itertools.product(range(len(first)), range(len(second))):
                target = [names.get(loop, "-") for loop in second[j]]
                source = [loop if loop in "bmn" or len(loops) == 2 else "-" for loop in first[i]]
                for size, a, b in zip(self.mesh, source, target, strict=True):
                    if a != b and a != "-":
                        matrix[i, j] += 4 * elements * (size - 1) / size / (size if b != "-" else 1) / 1e11
            self.pool[key] = matrix * self.repeats
        self.edges.append((u, v, self.pool[key]))

    def problem(self, limit_part):
        limit = None
        if limit_part is not None:
            limit = limit_part * sum(row[3].max() for row in self.rows)
        return ChoiceProblem.from_rows([costs for _, costs in self.costs], self.edges, self.rows, limit)
