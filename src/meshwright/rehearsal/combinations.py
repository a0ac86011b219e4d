"""Combinations of a segment's strategies: one type of loop for each block, as a plan of the whole program.

Every occurrence of the segment is split alike, and all that the choice leaves open is optimised: so what is measured
of a combination is what a plan that contains it does.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from meshwright.blocks import Blocks, Segment
from meshwright.errors import DoesNotFit, ShardingError
from meshwright.graph import Traced
from meshwright.hardware import Mesh
from meshwright.planner.budget import Budget
from meshwright.planner.fixed_splits import FixedSplits
from meshwright.planner.planner import plan_program
from meshwright.plans.plan import PlanData
from meshwright.progress import Say
from meshwright.rehearsal.parts import MeasuredPart, parts_of

FREE = FixedSplits()  # fixes nothing


@dataclass(frozen=True)
class Combination:
    """One choice for each block of a segment, planned and priced.

    Attributes:
        choices: For each block, the type of the loops that are split.
        plan: The best plan of the whole program with these choices.
        part: The segment in that plan.
        sent_bytes: Bytes that each device sends in one run of the segment.
    """

    choices: tuple[str, ...]
    plan: PlanData
    part: MeasuredPart
    sent_bytes: float

    @property
    def price_s(self) -> float:
        """The model's price of one run of the segment."""
        return self.part.modelled_s + self.part.communication_s

    @property
    def name(self) -> str:
        """The choices in one word each."""
        return " ".join(self.choices)


def choices_of(blocks: Blocks, segment: Segment, most: int | None = None) -> list[tuple[str, ...]]:
    """The combinations of a segment in order; of more than ``most`` a fixed random sample."""
    options = [blocks.blocks[number].choices for number in segment.blocks]
    count = prod(map(len, options))
    if most is None or count <= most:
        return list(product(*options))
    chosen = sorted(random.Random(0).sample(range(count), most))
    return [_nth(options, number) for number in chosen]


def _nth(options: Sequence[tuple[str, ...]], number: int) -> tuple[str, ...]:
    found = []
    for names in reversed(options):
        number, place = divmod(number, len(names))
        found.append(names[place])
    return tuple(reversed(found))


def some_combinations(
    traced: Traced,
    blocks: Blocks,
    segment: Segment,
    mesh: Mesh,
    most: int,
    seconds: float,
    say: Say,
    method: FixedSplits = FREE,
) -> tuple[list[Combination], int]:
    """Plans combinations in random order, at most so many and until so much time is over; and how many it tried."""
    choices = choices_of(blocks, segment, most)
    random.Random(0).shuffle(choices)  # in order, the first would be alike
    found, tried, started = list[Combination](), 0, time.perf_counter()

    def count(text: str) -> None:
        nonlocal tried
        tried += 1
        say(text)

    for one in plan_combinations(traced, blocks, segment, mesh, choices, count, method):
        found.append(one)
        if time.perf_counter() - started > seconds:
            break
    return found, tried


def plan_combinations(
    traced: Traced,
    blocks: Blocks,
    segment: Segment,
    mesh: Mesh,
    choices: Sequence[tuple[str, ...]],
    say: Say,
    method: FixedSplits = FREE,
) -> Iterator[Combination]:
    """Plans combinations one after another; those that the shapes, the mesh or the memory rule out are left out."""
    for number, some in enumerate(choices):
        say(f"planning combination {number + 1} of {len(choices)}")
        try:
            fixed = replace(method, splits=_splits(blocks, segment, some))
            plan = plan_program(traced, [mesh], fixed, lambda _: None, Budget(None))
        except (ShardingError, DoesNotFit):
            continue
        parts = [part for part in parts_of(plan, traced.graph, blocks) if part.fingerprint == segment.fingerprint]
        part = max(parts, key=lambda part: len(part.occurrences))
        yield Combination(some, plan, part, _sent_bytes(plan, traced, part))


def _splits(blocks: Blocks, segment: Segment, choices: Sequence[str]) -> dict[int, tuple[int, ...]]:
    return {
        entry.operation: entry.loops[name]
        for numbers in segment.block_numbers
        for number, name in zip(numbers, choices, strict=True)
        for entry in blocks.blocks[number].entries
    }


def _sent_bytes(plan: PlanData, traced: Traced, part: MeasuredPart) -> float:
    serials = {traced.graph.ops[index].serial for index in part.operations}
    return sum(item.bytes * item.trips for item in plan.collectives if item.serial in serials) / max(part.trips, 1.0)
