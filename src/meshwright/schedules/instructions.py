"""What each stage of a pipeline does in a step, as a list of instructions; the runtime and the simulator follow it.

A schedule says in which order a stage works on microbatches (`table`). This adds what the stages tell each other: every
value that one stage computes and another reads is sent right after it was computed, and received right before it is
read. Between two stages messages arrive in the order in which they were sent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from meshwright.schedules import table
from meshwright.schedules.base import BACKWARD, FORWARD, WEIGHTS, Rows, Step

RUN, SEND, RECEIVE, FREE, EXCHANGE, UPDATE = "run", "send", "receive", "free", "exchange", "update"
PARAMETERS = "parameters"  # what stages send at the start of a step: parameters that several of them read


class Link(NamedTuple):
    """Values that one pass computes and another reads: ``(work, virtual stage)`` of both."""

    source: tuple[str, int]
    target: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a stage.

    Attributes:
        do: ``run`` a pass over a microbatch, ``send`` or ``receive`` values, ``free`` what a microbatch left behind,
            ``exchange`` sums and norms with other stages, or ``update`` the state.
        work: The pass: ``forward``, ``backward`` or ``weights``; of values that are sent, the pass that computed them;
            ``parameters`` for parameters that several stages read.
        microbatch: Which microbatch; -1 for none.
        chunk: The virtual stage of the pass; -1 for none.
        peer: The stage that values go to or come from; -1 for none.
        target: Of values that are sent, the pass and virtual stage that read them.
        round: Of an update, which part of it: stages exchange values between two rounds.
    """

    do: str
    work: str = ""
    microbatch: int = -1
    chunk: int = -1
    peer: int = -1
    target: tuple[str, int] = ("", -1)
    round: int = -1

    def __str__(self) -> str:
        if self.do == FREE:
            return f"free microbatch {self.microbatch} of chunk {self.chunk}"
        if self.do in (UPDATE, EXCHANGE):
            return f"{self.do} {self.round}"
        if self.do == RUN:
            return f"run {self.work} {self.microbatch} of chunk {self.chunk}"
        way = f"to stage {self.peer}" if self.do == SEND else f"from stage {self.peer}"
        if self.work == PARAMETERS:
            return f"{self.do} shared parameters {way}"
        return f"{self.do} {self.work} {self.microbatch} of chunk {self.chunk} {way}"


def chain(num_chunks: int, trains: bool = True, last: str = BACKWARD) -> tuple[Link, ...]:
    """The links of a model whose layers read one another in a row.

    Args:
        num_chunks: How many virtual stages there are.
        trains: Whether there is a backward pass.
        last: The pass of the first virtual stage that ends a microbatch's way back.
    """
    ahead = [Link((FORWARD, v), (FORWARD, v + 1)) for v in range(num_chunks - 1)]
    back = [Link((BACKWARD, v), (BACKWARD if v > 1 else last, v - 1)) for v in range(1, num_chunks)] if trains else []
    return (*ahead, *back)


@lru_cache(maxsize=64)
def instructions_in_a_row(
    schedule: str,
    num_stages: int,
    num_microbatches: int,
    interleave: int = 1,
    shares: tuple[tuple[int, int], ...] = (),
) -> tuple[tuple[Instruction, ...], ...]:
    """The instructions of each stage of a model whose layers read one another in a row.

    Args:
        schedule, num_stages, num_microbatches, interleave: See `table`.
        shares: Pairs of stages of which the first sends parameters to the second at the start of a step.
    """
    rows = table(schedule, num_stages, num_microbatches, interleave)
    trains = any(step.work == BACKWARD for step in rows[0])
    last = BACKWARD
    if any(step.work == WEIGHTS for step in rows[0]):
        # Nobody waits for gradients of what the first virtual stage reads: all its gradients are in one pass.
        rows = (tuple(step for step in rows[0] if (step.work, step.chunk) != (BACKWARD, 0)), *rows[1:])
        last = WEIGHTS
    # All stages exchange what the norm of all gradients needs before any of them updates.
    return instruct(rows, chain(num_stages * interleave, trains, last), shares, num_rounds=2 if trains else 0)


def instruct(
    rows: Rows,
    links: Sequence[Link],
    shares: Sequence[tuple[int, int]] = (),
    num_rounds: int = 1,
) -> tuple[tuple[Instruction, ...], ...]:
    """The instructions of each stage.

    Args:
        rows: The schedule, as `table` gives it.
        links: Which passes read values of which others, of other stages.
        shares: Pairs of stages of which the first sends parameters to the second at the start of a step.
        num_rounds: Rounds of the update.
    """
    count = len(rows)
    lists, ends = [], _by_ends(links)
    for stage, row in enumerate(rows):
        instructions: list[Instruction] = []
        instructions += [Instruction(SEND, PARAMETERS, peer=b) for a, b in shares if a == stage]
        instructions += [Instruction(RECEIVE, PARAMETERS, peer=a) for a, b in shares if b == stage]
        last = {(step.chunk, step.microbatch): place for place, step in enumerate(row)}
        for place, step in enumerate(row):
            instructions += _pass(step, stage, count, ends)
            if last[step.chunk, step.microbatch] == place:
                chunk = step.chunk * count + stage
                instructions.append(Instruction(FREE, microbatch=step.microbatch, chunk=chunk))
        for number in range(num_rounds):
            instructions += [Instruction(UPDATE, round=number)]
            instructions += [Instruction(EXCHANGE, round=number)] if number < num_rounds - 1 else []
        lists.append(tuple(instructions))
    return tuple(lists)


_Ends = tuple[dict[tuple[str, int], list[Link]], dict[tuple[str, int], list[Link]]]


def _by_ends(links: Sequence[Link]) -> _Ends:
    """Links by their targets, and by their sources."""
    into: dict[tuple[str, int], list[Link]] = {}
    out: dict[tuple[str, int], list[Link]] = {}
    for link in links:
        into.setdefault(link.target, []).append(link)
        out.setdefault(link.source, []).append(link)
    return into, out


def _pass(step: Step, stage: int, count: int, ends: _Ends) -> Iterator[Instruction]:
    """One pass, with what comes in before it and what goes out after it."""
    here = (step.work, step.chunk * count + stage)
    for link in ends[0].get(here, ()):
        work, chunk = link.source
        if chunk % count != stage:
            yield Instruction(RECEIVE, work, step.microbatch, chunk, chunk % count, here)
    yield Instruction(RUN, step.work, step.microbatch, here[1])
    for link in ends[1].get(here, ()):
        if link.target[1] % count != stage:
            yield Instruction(SEND, step.work, step.microbatch, here[1], link.target[1] % count, link.target)


def message(one: Instruction, stage: int) -> tuple:
    """What a stage sends or receives: equal for both ends."""
    source, target = (stage, one.peer) if one.do == SEND else (one.peer, stage)
    return source, target, one.work, one.microbatch, one.chunk, one.target
