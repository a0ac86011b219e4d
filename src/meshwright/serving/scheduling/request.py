"""One request as the scheduler sees it: its tokens, how far they are computed, and where."""

from array import array
from collections.abc import Sequence
from enum import Enum
from hashlib import blake2b

from meshwright.errors import ServingError


class Status(Enum):
    """Where a request is. A preempted one waits with what it has generated, and is computed again from its tokens."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"


class Request:
    """One sequence from its prompt to its end; only the scheduler changes it.

    Attributes:
        id: A name of the caller's choice, unique among the requests of a scheduler.
        prompt: The tokens of the prompt. A simulation may give their number instead: they share no prefix then.
        num_prompt: How many there are.
        max_tokens: The most tokens to generate.
        arrival_s: When it came, for whoever measures; the scheduler goes by the order of `add`.
        status: Where it is.
        finish_reason: Why it ended: "stop", "length", "cancelled" or "error"; None before.
        slot: Its place in the batch while it runs.
        block_table: Its blocks, in the order of its tokens. A new list after each preemption.
        computed: For how many tokens the cache is computed, or will be by the steps planned.
        num_generated: How many tokens are generated, or will be by the steps planned.
        generated: Those whose values are known; a step that is planned and not yet committed adds one.
        cached_tokens: How many tokens of the prompt were found in the cache when it first ran.
        preemptions: How often its blocks were taken away.
        arrived: How many tokens of the prompt come computed from elsewhere, when it first runs; then 0.
    """

    __slots__ = (
        "_named",
        "_names",
        "arrival_s",
        "arrived",
        "block_table",
        "cached_tokens",
        "computed",
        "finish_reason",
        "generated",
        "id",
        "max_tokens",
        "num_generated",
        "num_prompt",
        "preemptions",
        "prompt",
        "slot",
        "status",
    )

    def __init__(
        self, id: int | str, prompt: Sequence[int] | int, max_tokens: int, arrival_s: float = 0.0, *, arrived: int = 0
    ):
        self.id = id
        self.prompt = None if isinstance(prompt, int) else prompt
        self.num_prompt = prompt if isinstance(prompt, int) else len(prompt)
        for name, value in (("the number of tokens in the prompt", self.num_prompt), ("max_tokens", max_tokens)):
            if value < 1:
                raise ServingError(f"{name} is {value}; give at least 1")
        self.max_tokens = max_tokens
        self.arrival_s = arrival_s
        self.arrived = arrived
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.slot: int | None = None
        self.block_table: list[int] = []
        self.computed = 0
        self.num_generated = 0
        self.generated: list[int] = []
        self.cached_tokens = 0
        self.preemptions = 0
        self._names: list[bytes] = []
        self._named = 0

    @property
    def num_tokens(self) -> int:
        """The length of the sequence, with the tokens that the planned steps will generate."""
        return self.num_prompt + self.num_generated

    @property
    def ended(self) -> bool:
        """Whether it has finished or was cancelled."""
        return self.finish_reason is not None

    def tokens(self, start: int, count: int) -> list[int]:
        """Known tokens of the sequence from a position on."""
        assert self.prompt is not None, "a request of a simulation has no tokens"
        end, border = start + count, self.num_prompt
        values = list(self.prompt[start : min(end, border)])
        if end > border:
            values += self.generated[max(start - border, 0) : end - border]
        assert len(values) == count, f"token {start + len(values)} of request {self.id} is not known yet"
        return values

    def names(self, block_size: int) -> list[bytes]:
        """The names of all full blocks of known tokens: each the digest of the one before it and of its own tokens.

        A digest that nobody can forge (16 bytes of BLAKE2), since whoever found two prompts with one name could read
        what another client's prompt had left in the cache.
        """
        if self.prompt is None:
            return []
        for number in range(len(self._names), (self.num_prompt + len(self.generated)) // block_size):
            before = self._names[number - 1] if number else b""
            content = array("q", self.tokens(number * block_size, block_size)).tobytes()
            self._names.append(blake2b(before + content, digest_size=16).digest())
        return self._names

    def newly_full(self, computed: int, block_size: int) -> tuple[int, list[bytes]]:
        """The names of the blocks that became full of computed tokens since the last call, and which is the first."""
        first, end = self._named, computed // block_size
        if self.prompt is None or end <= first:
            return first, []
        self._named = end
        return first, self.names(block_size)[first:end]

    def start(self, slot: int, block_table: list[int], computed: int, named: int) -> None:
        """It runs from now on, with a prefix that is computed and the blocks of it that have names."""
        self.status, self.slot = Status.RUNNING, slot
        self.block_table, self.computed, self._named = block_table, computed, named

    def stop(self, status: Status) -> None:
        """It runs no longer; its blocks and its slot belong to others."""
        self.status, self.slot = status, None
        self.block_table, self.computed, self._named = [], 0, 0
