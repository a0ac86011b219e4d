"""Grouping and folding once more, one operation after another in plain Python: slow, and easy to follow."""

from collections import Counter

from meshwright.graph import BACKWARD, UPDATE
from meshwright.graph.repeats import find_runs
from meshwright.planner.grouping.folding import PERIODS, Shared
from meshwright.planner.grouping.groups import Group, Slot
from meshwright.rules import loop_nest


class GroupingByHand:
    """As `Grouping`."""

    def __init__(self, graph):
        self.graph = graph
        self.groups, self.home, self.place = [], {}, {}
        self.virtual, self.rooted = set(graph.constants), set()
        self.sizes = {v: graph.sizes[v] for v in range(len(graph.types))}
        self.returned = set(graph.outputs) | {t.made for t in graph.ties}
        self.state_of = {graph.outputs[o]: graph.inputs[i] for o, i in graph.state.items()}
        self.read_forward = {v for op in graph.ops if op.phase != UPDATE for v in op.inputs}
        for value in graph.inputs:
            self.open(Group(None, value), [value])
        for index, op in enumerate(graph.ops):
            self.put(index, op, loop_nest(op.signature))
        self.find_slots()
        self.gradients = self.find_gradients()

    def open(self, group, values):
        self.groups.append(group)
        self.join(len(self.groups) - 1, values)

    def join(self, group, values):
        for value in values:
            if self.graph.types[value].shape:
                self.home[value], self.place[value] = group, len(self.groups[group].values)
                self.groups[group].values.append(value)

    def put(self, index, op, nest):
        real = [p for p, v in enumerate(op.inputs) if v in self.home]
        rooted = bool(real) or not self.rooted.isdisjoint(op.inputs)
        large = not real or self.sizes[op.outputs[0]] >= 2 * self.sizes[op.inputs[real[0]]]
        if (nest.leads or large) and self.is_virtual(op, nest, real, rooted):
            self.virtual.update(op.outputs)
            if rooted:
                self.rooted.update(v for v in op.outputs if self.graph.types[v].shape)
        elif real and not nest.leads:
            followed = self.followed(op, real)
            group = self.home[op.inputs[followed]]
            self.groups[group].ops.append(index)
            self.groups[group].follows.append(followed)
            self.join(group, op.outputs)
        elif any(self.graph.types[v].shape for v in (*op.outputs, *op.inputs)):
            self.open(Group(index, None, [index], [-1]), op.outputs)

    def is_virtual(self, op, nest, real, rooted):
        if not self.returned.isdisjoint(op.outputs) or op.primitive == "loop_carry":
            return False
        if not rooted:
            scalars = [v for v in op.inputs if v not in self.virtual and not self.graph.types[v].shape]
            return not scalars or not nest.leads
        if any(loop.kind != "parallel" for loop in nest.loops):
            return False
        return not real or sum(self.sizes[v] for v in op.outputs) >= 2 * sum(self.sizes[v] for v in op.inputs)

    def followed(self, op, real):
        largest = max(self.sizes[op.inputs[p]] for p in real)
        equals = [p for p in real if self.sizes[op.inputs[p]] == largest]
        group_of = {p: self.groups[self.home[op.inputs[p]]] for p in equals}
        state = [self.state_of[v] for v in op.outputs if v in self.state_of]
        own = [p for p in equals if state and self.home[op.inputs[p]] == self.home.get(state[0])]
        if own:
            return own[0]
        if op.phase == UPDATE:
            shape = self.graph.types[op.outputs[0]].shape
            arguments = {p: group_of[p].argument for p in equals}
            led = [p for p, a in arguments.items() if a is not None and self.graph.types[a].shape == shape]
            if led:
                return min(led, key=lambda p: arguments[p] in self.read_forward)
        return max(equals, key=lambda p: (group_of[p].leader or -1, -p))

    def find_slots(self):
        graph = self.graph
        for number, group in enumerate(self.groups):
            for member, index in enumerate(group.ops):
                op = graph.ops[index]
                roots = [(operand, root) for operand, value in enumerate(op.inputs) for root in self.roots(value)]
                group.slots += [Slot(root, member, p, op.trips) for p, root in roots if self.home[root] != number]
        pairs = [(t.made, t.carry, t.trips) for t in graph.ties]
        pairs += [(graph.outputs[o], graph.inputs[i], 1.0) for o, i in graph.state.items()]
        for made, taken, trips in pairs:
            if taken in self.home and made in self.home and self.home[made] != self.home[taken]:
                self.groups[self.home[taken]].slots.append(Slot(made, -1, self.place[taken], trips))

    def pulled(self, value):
        seen, stack = set(), [value]
        while stack:
            v = stack.pop()
            if v in self.rooted and self.graph.producer[v] not in seen:
                seen.add(self.graph.producer[v])
                stack.extend(self.graph.ops[self.graph.producer[v]].inputs)
        return sorted(seen, reverse=True)

    def roots(self, value):
        if value in self.home:
            return [value]
        inputs = [v for index in self.pulled(value) for v in self.graph.ops[index].inputs]
        return list(dict.fromkeys(v for v in inputs if v in self.home))

    def find_gradients(self):
        found = set()
        for op in reversed(self.graph.ops):
            if op.phase == UPDATE:
                found.update(op.inputs)
            elif op.phase == BACKWARD and not found.isdisjoint(op.outputs):
                found.update(v for v in op.inputs if self.sizes[v] == self.sizes[op.outputs[0]])
        return found & {v for op in self.graph.ops if op.phase == BACKWARD for v in op.outputs}


def token(grouping, number, pins):
    """Equal for groups that are built alike."""
    graph, group, first_read = grouping.graph, grouping.groups[number], {}

    def wire(value):
        if grouping.home[value] == number:
            return "own", grouping.place[value]
        return "read", first_read.setdefault(value, len(first_read))

    parts = [graph.types[group.argument] if group.argument is not None else None]
    parts.append(tuple(pins.get(v) for v in group.values))
    for index, followed in zip(group.ops, group.follows, strict=True):
        op, wiring = graph.ops[index], []
        for value in op.inputs:
            if value in grouping.home:
                wiring.append(wire(value))
            elif value in grouping.virtual:
                made = tuple(id(graph.ops[i].signature) for i in grouping.pulled(value))
                wiring.append((made, tuple(wire(root) for root in grouping.roots(value))))
        parts.append((id(op.signature), followed, op.trips, op.phase, tuple(wiring)))
    parts.append(tuple((s.member, s.operand, first_read.get(s.value, -1)) for s in group.slots))
    return tuple(parts)


def classes(grouping, pins):
    """The class of each group, by any name."""
    groups, names = grouping.groups, {}
    tokens = [names.setdefault(token(grouping, i, pins), len(names)) for i in range(len(groups))]
    led = [i for i, group in enumerate(groups) if group.leader is not None]
    found = [
        ("alone", i) if group.leader is not None else ("argument", t)
        for i, (group, t) in enumerate(zip(groups, tokens, strict=True))
    ]
    for number, run in enumerate(find_runs([tokens[i] for i in led])):
        for position in range(run.start, run.stop):
            lap, offset = divmod(position - run.start, run.period)
            found[led[position]] = ("run", number, offset, lap % PERIODS)
    for _ in range(3):
        seen = [set() for _ in groups]
        for reader, group in enumerate(groups):
            for slot, read in enumerate(group.slots):
                source, how = grouping.home[read.value], (slot, grouping.place[read.value])
                seen[source].add((found[reader], how, True))
                seen[reader].add((found[source], how, False))
        found = [
            c if g.leader is not None else ("argument", t, frozenset(s))
            for c, g, t, s in zip(found, groups, tokens, seen, strict=True)
        ]
    return found


def shared_readings(grouping):
    readings = {}
    for number, group in enumerate(grouping.groups):
        for slot, read in enumerate(group.slots):
            if read.member >= 0:
                phase = grouping.graph.ops[group.ops[read.member]].phase
                readings.setdefault((read.value, phase, read.trips), []).append((number, slot))
    several = [(key, readers) for key, readers in readings.items() if len({g for g, _ in readers}) > 1]
    return [Shared(value, phase, tuple(readers)) for (value, phase, _), readers in several]


def edges(grouping, folded):
    """How often each class of edges occurs, given the classes."""
    home, place, group_class, found, through = grouping.home, grouping.place, folded.group_class, Counter(), {}
    for i, reading in enumerate(folded.shared):
        found[group_class[home[reading.value]], place[reading.value], folded.shared_class[i], -1] += 1
        through |= dict.fromkeys(reading.readers, folded.shared_class[i])
    for number, group in enumerate(grouping.groups):
        for slot, read in enumerate(group.slots):
            source = (group_class[home[read.value]], place[read.value])
            if (number, slot) in through:
                source = (through[number, slot], -1)
            found[*source, group_class[number], slot] += 1
    return found
