"""Continuous batching: after every step, which tokens of which requests come next.

Requests run in the order in which they came. Every sequence that generates gets its token in every step, so nobody's
stream halts for another's long prompt; what the step has left goes to prompts, cut into chunks. A request is let in
when there is a slot, and blocks for all its tokens beside one for each running request that will need more. When blocks
run out nevertheless, the request that came last gives up its own and is computed again later: the first one always goes
on, so every one ends.

One step of lookahead: `schedule` may be called for the next step before the tokens of the last are known. A request
counts its tokens when they are planned, and `commit` brings their values. What is freed between the two may be handed
out at once, since a device carries out its steps in order.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from meshwright.errors import ServingError
from meshwright.serving.requests import Overloaded
from meshwright.serving.scheduling.blocks import BlockPool
from meshwright.serving.scheduling.limits import Limits
from meshwright.serving.scheduling.request import Request, Status
from meshwright.serving.scheduling.slots import SlotPool

_NONE: Mapping[int | str, str] = MappingProxyType({})


@dataclass(slots=True, eq=False)  # nobody changes one; to freeze it would take a third of a simulation's time
class Slice:
    """The tokens of one request that a step computes.

    Attributes:
        request: Whose tokens.
        start: The position of the first one; all before it are in the cache.
        count: How many.
        slot: The place in the batch, the same from step to step while the request runs.
        block_table: The request's blocks: as of this step at least, since later steps append to it.
        samples: Whether they reach the end of the sequence, so that the step takes the next token.
        follows: Whether the last of them is what the slot's last step took, and the host does not know it yet.
        arrives: Whether what lies before them is to be written to the cache first: it was computed elsewhere.
    """

    request: Request
    start: int
    count: int
    slot: int
    block_table: list[int]
    samples: bool
    follows: bool
    arrives: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes; nothing is to be done where there are no slices.

    Attributes:
        slices: The tokens.
        copies: What is copied before, in this order: the whole of one slot to another.
    """

    slices: tuple[Slice, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes."""
        return sum(piece.count for piece in self.slices)


class Scheduler:
    """The requests of one engine. Not for several threads at once.

    Attributes:
        limits: What the requests share.
        pool: The blocks of the cache.
        preemptions: How often a request gave up its blocks.
        prompt_tokens: Tokens of prompts that were let in.
        cached_tokens: How many of them were found in the cache.
    """

    def __init__(self, limits: Limits):
        self.limits = limits
        self.pool = BlockPool(limits.blocks)
        self.preemptions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in the order in which they came
        self._open: dict[int | str, Request] = {}
        self._slots = SlotPool(limits.rungs)
        self._copies: list[tuple[int, int]] = []  # of the next step

    @property
    def running(self) -> int:
        """How many requests have a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many requests wait for one, preempted ones included."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Takes a request into the queue.

        Raises:
            Overloaded: The queue is full.
            ServingError: It is longer than can be served, or its id is in use.
        """
        longest, asked = self.limits.most_tokens(), request.num_prompt + request.max_tokens
        if asked > longest:
            raise ServingError(
                f"the prompt has {request.num_prompt} tokens and max_tokens is {request.max_tokens}, together {asked}; "
                f"at most {longest} can be served"
            )
        if request.id in self._open:
            raise ServingError(f"request {request.id!r} is being served already; give another id")
        if len(self._waiting) >= self.limits.queue:
            raise Overloaded(f"{len(self._waiting)} requests wait, as many as the queue holds; try again later")
        self._open[request.id] = request
        self._waiting.append(request)

    def found(self, names: Sequence[bytes]) -> int:
        """How many pieces of a prompt with these names, from the first on, are in the cache."""
        return self._slots.longest(names) if self.limits.reuse else len(self.pool.prefix(names))

    def cancel(self, id: int | str) -> None:
        """Ends a request at once; its blocks are free. One that has ended, or is not known, is left as it is."""
        self.end(id, "cancelled")

    def end(self, id: int | str, reason: str) -> None:
        """Ends a request at once for any other reason, such as "stop" or "error"."""
        request = self._open.get(id)
        if request is not None:
            self._end(request, reason)

    def schedule(self) -> StepPlan:
        """The next step; whatever it computes counts as computed from here on."""
        limits, running = self.limits, self._running
        generating = sum(1 for request in running if request.num_tokens - request.computed == 1)
        room = min(limits.chunk, limits.token_budget - generating)  # for tokens of prompts
        slices: list[Slice] = []
        preemptions, position = self.preemptions, 0
        while position < len(running):  # the last ones may be preempted meanwhile
            request = running[position]
            position += 1
            if request.num_generated == request.max_tokens:
                continue  # its last token is on its way
            count = request.num_tokens - request.computed
            if count > 1:
                count = min(count, room)
                room -= count
                if not count:
                    continue
            elif not self._grow(request):
                break
            slices.append(self._slice(request, count))
        while self._waiting and room and self.preemptions == preemptions and self._admit(self._waiting[0]):
            request = self._waiting.popleft()
            running.append(request)
            count = min(request.num_tokens - request.computed, room)
            room -= count
            slices.append(self._slice(request, count))
        copies, self._copies = tuple(self._copies), []
        return StepPlan(tuple(slices), copies)

    def commit(
        self, plan: StepPlan, tokens: Sequence[int] | None = None, ended: Mapping[int | str, str] = _NONE
    ) -> list[Request]:
        """Takes what a step has brought; steps are committed in the order in which they were scheduled.

        Args:
            plan: The step.
            tokens: The token of each slice that samples, in order; of requests that have ended meanwhile, any number.
                A simulation, whose tokens have no values, gives none.
            ended: Requests that end with this token, and why. Those that reach `max_tokens` end by themselves.

        Returns:
            The requests that ended with this step.
        """
        sampling = sum(1 for piece in plan.slices if piece.samples)
        assert tokens is None or len(tokens) == sampling, f"{sampling} tokens are due"
        values = iter(tokens or [0] * sampling)
        over = []
        for piece in plan.slices:
            request = piece.request
            token = next(values) if piece.samples else 0
            if request.finish_reason is not None:
                continue
            if piece.samples:
                request.generated.append(token)
            if piece.block_table is request.block_table:  # not preempted since
                self._name(request, piece.start + piece.count)
            if piece.samples:
                reason = ended.get(request.id) or ("length" if len(request.generated) == request.max_tokens else None)
                if reason is not None:
                    self._end(request, reason)
                    over.append(request)
        return over

    def _name(self, request: Request, computed: int) -> None:
        """Says which parts of the cache hold what of a request, so that others may begin with it."""
        reuse = self.limits.reuse
        first, names = request.newly_full(computed, self.limits.piece)
        if not names:  # as of most tokens, and of all in simulations; a table's end would be copied for nothing
            return
        if reuse:
            assert request.slot is not None
            self._slots.name(request.slot, names)
            return
        for block, name in zip(request.block_table[first:], names, strict=False):
            self.pool.name(block, name)

    def _slice(self, request: Request, count: int) -> Slice:
        start, follows = request.computed, request.num_generated > len(request.generated)
        request.computed = start + count
        samples = request.computed == request.num_tokens
        request.num_generated += samples
        assert request.slot is not None
        arrives, request.arrived = bool(request.arrived), 0
        return Slice(request, start, count, request.slot, request.block_table, samples, follows, arrives)

    def _grow(self, request: Request) -> bool:
        """Sees that the next token has a block; returns False if the request itself had to give up its blocks."""
        if request.computed < len(request.block_table) * self.limits.block_size:
            return True
        while not self.pool.available:
            last = self._running.pop()
            self._leave(last, Status.PREEMPTED)
            last.preemptions += 1
            self.preemptions += 1
            self._waiting.appendleft(last)
            if last is request:
                return False
        request.block_table += self.pool.allocate(1)
        return True

    def _admit(self, request: Request) -> bool:
        """Gives a waiting request a slot, blocks for all its tokens and what the cache has of them, if it can."""
        if not self._slots.available or request.num_generated > len(request.generated):  # its last token is on its way
            return False
        size = self.limits.piece
        names = request.names(size)[: (request.num_tokens - 1) // size]  # one token at least is computed
        if request.arrived:  # what comes is written to blocks of its own
            names = []
        prefix = self.pool.prefix(names)
        fresh = self.limits.blocks_for(request.num_tokens) - len(prefix)
        spare = sum(1 for other in self._running if self._will_grow(other))
        if fresh + spare > self.pool.available - self.pool.idle(prefix):
            return False
        self.pool.share(prefix)
        place = self._slots.take(names if self.limits.reuse else ())
        pieces = place.pieces or len(prefix)
        computed = max(pieces * size, request.arrived)
        if place.source is not None:
            self._copies.append((place.source, place.slot))
        if not request.preemptions:
            request.cached_tokens = computed
            self.prompt_tokens += request.num_prompt
            self.cached_tokens += computed
        request.start(place.slot, prefix + self.pool.allocate(fresh), computed, pieces)
        return True

    def _will_grow(self, request: Request) -> bool:
        longest = request.num_prompt + request.max_tokens - 1
        return longest > len(request.block_table) * self.limits.block_size

    def _end(self, request: Request, reason: str) -> None:
        if request.status is Status.RUNNING:
            self._running.remove(request)
            self._leave(request, Status.RUNNING)
        else:
            self._waiting.remove(request)
        request.status = Status.CANCELLED if reason == "cancelled" else Status.FINISHED
        request.finish_reason = reason
        del self._open[request.id]

    def _leave(self, request: Request, status: Status) -> None:
        """Gives a running request's blocks and slot back."""
        assert request.slot is not None
        self.pool.free(request.block_table)
        self._slots.free(request.slot)
        request.stop(status)
