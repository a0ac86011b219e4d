"""One replica that is simulated: the engine's scheduler, and a clock that its steps move."""

from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.serving.planning.prices import StepPrices
from meshwright.serving.scheduling import Limits, Request, Scheduler, Slice, StepPlan


@dataclass(slots=True)
class PricedStep:
    """What one step did, as `StepPrices.step_s` takes it; kept so that others may price it again."""

    start_s: float
    seconds: float
    tokens: int
    sequences: int
    cached: int
    pairs: float
    waiting: int
    blocks: int


@dataclass
class Replica:
    """A replica and the step that it is at.

    Attributes:
        prices: What its steps take.
        limits: What its requests share.
        role: "both", "prefill" or "decode": what it computes of each request. One that only decodes gets requests whose
            prompts are in the cache that it is sent: the scheduler finds room for them and their tokens cost nothing.
        number: Its place among the replicas.
        model: Which of several models it serves.
        devices: A name of its devices. Replicas of several models on the same devices take turns, step by step.
    """

    prices: StepPrices
    limits: Limits
    role: str = "both"
    number: int = 0
    model: str = ""
    devices: int = -1
    busy_s: float = 0.0
    ends_s: float = 0.0
    steps: list[PricedStep] = field(default_factory=list)
    plan: StepPlan | None = None

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)

    @property
    def load(self) -> int:
        """Requests that are here, by which a router sends the next one to the least loaded."""
        return self.scheduler.running + self.scheduler.waiting

    def start(self, now_s: float) -> bool:
        """Begins the next step, if there is anything to do; says whether."""
        plan = self.scheduler.schedule()
        if not plan.slices:
            return False
        step = self._priced(plan.slices, now_s)
        self.plan, self.ends_s = plan, now_s + step.seconds
        self.busy_s += step.seconds
        self.steps.append(step)
        return True

    def finish(self, first: Callable[[Request], None]) -> list[Request]:
        """Ends the step: the requests that ended with it; calls `first` for those that got their first token."""
        assert self.plan is not None
        plan, self.plan = self.plan, None
        for piece in plan.slices:
            request = piece.request
            if piece.samples and request.num_generated == min(self.prices.engine.stream, request.max_tokens):
                first(request)
        return self.scheduler.commit(plan)

    def _priced(self, slices: tuple[Slice, ...], now_s: float) -> PricedStep:
        tokens = sequences = cached = 0
        pairs = 0.0
        sent = self.role == "decode"
        for piece in slices:
            count, start = piece.count, piece.start
            if piece.samples:
                sequences += 1
            if count == 1 or (sent and piece.samples):
                tokens += 1
                cached += start + count
            elif not sent:
                tokens += count
                pairs += count * (start + (count + 1) / 2)
        seconds = self.prices.step_s(tokens, sequences, cached, pairs)
        scheduler = self.scheduler
        return PricedStep(now_s, seconds, tokens, sequences, cached, pairs, scheduler.waiting, scheduler.pool.used)
