"""The ways to place replicas of a model, each with its largest batch under a promise and the load that it carries.

In a steady state with *B* running sequences every step computes one token of each and, so that as many begin as end,
the prompts of *B / out* new ones: a step of known content, whose time is the time per token. The load of the replica is
*B / (out · time)*. So the largest *B* whose step is within the promise, and whose sequences fit into the cache, is the
most that a replica carries if requests never come unevenly: a bound, which simulations then approach.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from meshwright.hardware import Cluster
from meshwright.serving.planning.decoder_work import DecoderWork
from meshwright.serving.planning.engine_constants import EngineConstants
from meshwright.serving.planning.prices import StepPrices
from meshwright.serving.planning.promise import Slo
from meshwright.serving.planning.split import Degrees, Storage
from meshwright.serving.planning.traffic import Traffic
from meshwright.serving.scheduling import Limits

#: Batches that are tried: four for each doubling.
_BATCHES = sorted({round(2 ** (power / 4)) for power in range(45)})
#: The most devices of one replica.
_MOST_DEVICES = 64
#: Tokens of a block of the cache, and requests that may wait.
_BLOCK, _QUEUE = 16, 100_000


@dataclass(frozen=True)
class Candidate:
    """One kind of replica.

    Attributes:
        prices: What its steps take.
        role: As in `simulation.replica.ROLES`.
        room: Tokens that its cache holds.
        batch: The most sequences that it lets run.
        rate: Requests a second that it carries if they come evenly.
        token_s: Seconds of a step then.
        first_s: Seconds from a request to its first token if it is alone.
        limit: What keeps it from carrying more, in words.
    """

    prices: StepPrices
    role: str
    room: int
    batch: int
    rate: float
    token_s: float
    first_s: float
    limit: str

    @property
    def num_devices(self) -> int:
        return self.prices.split.num_devices

    @property
    def rate_per_device(self) -> float:
        return self.rate / self.num_devices

    def limits(self, longest: int, chunk: int) -> Limits:
        """What the scheduler of such a replica may use."""
        batch = max(1, self.batch // self.prices.split.data) * self.prices.split.data  # each group has as many
        if self.role == "decode":  # prompts come computed, and cost it nothing
            chunk = batch * longest
        blocks = max(1, self.room // _BLOCK)
        return Limits(batch, _BLOCK, blocks, chunk, chunk + batch, _QUEUE, max(longest, 2))


def degrees(work: DecoderWork, cluster: Cluster) -> Iterator[Degrees]:
    """The ways to spread one replica over devices of a cluster: products inside hosts, stages in and across them."""
    per_host, total = cluster.devices_per_host, cluster.num_devices
    inside = [n for n in range(1, per_host + 1) if per_host % n == 0]
    hosts = [n for n in (1, 2, 4, 8, 16) if n <= cluster.num_hosts]
    tensors = [*inside, *(per_host * n for n in hosts if n > 1 and per_host * n <= 16)]
    for tensor in tensors:
        for data in [1, 2, 4, 8, 16, 32] if work.num_experts else [1]:
            for expert in sorted({1, tensor * data}) if work.num_experts else [1]:
                for pipeline in (1, 2, 4, 8, 16):
                    spread = Degrees(tensor, pipeline, data, expert)
                    group = tensor * data
                    whole = group % per_host == 0 or per_host % group == 0
                    if spread.num_devices <= min(total, _MOST_DEVICES) and whole and not spread.problem(work):
                        yield spread


def candidates(
    work: DecoderWork, cluster: Cluster, storages: tuple[Storage, ...], engine: EngineConstants
) -> list[StepPrices]:
    """All ways in which one replica fits."""
    every = (
        StepPrices(work, cluster, spread, storage, engine) for spread in degrees(work, cluster) for storage in storages
    )
    return [prices for prices in every if prices.room > 0]


def assess(prices: StepPrices, traffic: Traffic, slo: Slo, role: str, longest: int) -> Candidate | None:
    """The largest batch of a replica under a promise; None where it cannot serve the longest request at all."""
    into, out = traffic.mean_in, traffic.mean_out
    room = prices.room
    if room < longest:
        return None
    first_s = prices.engine.request_s + prompt_s(prices, into)
    if role == "prefill":
        seconds = prompt_s(prices, into, together=max(1.0, prices.engine.chunk / into))
        slots = max(1, min(room // longest, 256))
        return Candidate(prices, role, room, slots, 1 / seconds, 0.0, first_s, "computing prompts")
    begins = 0.0 if role == "decode" else 1 / out  # prompts that a step computes for each running sequence
    promised = inf if slo.tpot_s is None else slo.tpot_s
    best: tuple[int, float, float] | None = None
    limit = "the largest batch that is tried"
    for batch in _BATCHES:
        if batch * (into + out) > room and batch > 1:
            limit = "the cache"
            break
        tokens, pairs = batch * (1 + begins * into), batch * begins * into * into / 2
        token_s = prices.step_s(tokens, batch * (1 + begins), batch * (into + out / 2), pairs)
        if token_s > promised:
            limit = "the time per token"
            break
        rate = batch / (out * token_s)
        if best is not None and rate < best[1] * 1.005:
            limit = "arithmetic"
            break
        best = (batch, rate, token_s)
    if best is None:
        return None
    return Candidate(prices, role, room, *best, first_s, limit)


def prompt_s(prices: StepPrices, tokens: float, together: float = 1.0) -> float:
    """Seconds of a prompt's steps, where several are computed together."""
    chunk = prices.engine.chunk
    steps = max(1.0, tokens * together / chunk)
    size = tokens * together / steps
    pairs = tokens * tokens / 2 * together / steps
    return steps * prices.step_s(size, max(1.0, together / steps), 0, pairs) / together
