"""Lets requests arrive at replicas and time pass: the order of arrivals and of the ends of steps is all there is."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from heapq import heappop, heappush

from meshwright.serving.planning.promise import Slo
from meshwright.serving.planning.traffic import Arrival
from meshwright.serving.requests import Overloaded
from meshwright.serving.scheduling import Request
from meshwright.serving.simulation.outcome import Outcome, Served
from meshwright.serving.simulation.replica import Replica


class Simulation:
    """Replicas, and requests that come to them.

    Requests go to the replica with the fewest, of those with their model. Where some replicas compute prompts and
    others answers, each request passes from one of the first to one of the second, when its cache has been sent.

    Args:
        replicas: The replicas; all take part in serving the same model.
        slo: The promise.
        transfer_s: Seconds to send the cache of a prompt of so many tokens from one replica to another.
    """

    def __init__(self, replicas: Sequence[Replica], slo: Slo, transfer_s: Callable[[int], float] = lambda tokens: 0.0):
        self.replicas = tuple(replicas)
        self._front: dict[str, list[Replica]] = defaultdict(list)
        self._back: dict[str, list[Replica]] = defaultdict(list)
        self._sharing: dict[int, deque[Replica]] = defaultdict(deque)
        for number, replica in enumerate(replicas):
            (self._back if replica.role == "decode" else self._front)[replica.model].append(replica)
            replica.devices = replica.devices if replica.devices >= 0 else -2 - number
            self._sharing[replica.devices].append(replica)
        self._computing: set[int] = set()
        self._slo, self._transfer_s = slo, transfer_s
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._first_s: dict[int, float] = {}
        self._end_s: dict[int, float] = {}

    def serve(self, arrivals: Iterable[Arrival], clients: int = 0, models: Sequence[str] = ()) -> Outcome:
        """Serves requests to their ends.

        Args:
            arrivals: The requests, in the order in which they come.
            clients: With so many clients, each of which sends its next request when its last one has ended, times of
                arrival are not looked at; 0 for requests that come by themselves.
            models: The model of each request, where there are several.
        """
        asked = list(arrivals)
        self._asked, self._came_s = asked, [a.at_s for a in asked]
        self._models = models or [""] * len(asked)
        at_once = min(clients, len(asked)) if clients else len(asked)
        self._unsent = iter(range(at_once, len(asked)))
        for number in range(at_once):
            self._at(0.0 if clients else asked[number].at_s, partial(self._come, number))
        while self._events:
            now_s, _, event = heappop(self._events)
            event(now_s)
        served = [self._served(number) for number in range(len(asked))]
        return Outcome(tuple(served), self.replicas, self._slo)

    def _at(self, time_s: float, event: Callable[[float], None]) -> None:
        self._count += 1
        heappush(self._events, (time_s, self._count, event))

    def _come(self, number: int, now_s: float) -> None:
        asked, self._came_s[number] = self._asked[number], now_s
        replica = min(self._front[self._models[number]], key=lambda r: r.load)
        tokens_out = asked.tokens_out if replica.role == "both" else 1
        late_s = replica.prices.engine.request_s
        self._at(now_s + late_s, lambda at_s: self._add(replica, number, asked.tokens_in, tokens_out, at_s))

    def _add(self, replica: Replica, number: int, prompt: int, tokens_out: int, now_s: float) -> None:
        try:
            replica.scheduler.add(Request(number, prompt, tokens_out, now_s))
        except Overloaded:
            self._first_s.setdefault(number, math.inf)
            return
        if replica.devices not in self._computing:
            self._begin_step(replica.devices, now_s)

    def _begin_step(self, devices: int, now_s: float) -> None:
        """Begins the next step on some devices: of the replica there whose last step is the longest ago."""
        sharing = self._sharing[devices]
        for _ in range(len(sharing)):
            replica = sharing[0]
            sharing.rotate(-1)
            if replica.start(now_s):
                self._computing.add(devices)
                self._at(replica.ends_s, partial(self._step_ends, replica))
                return

    def _step_ends(self, replica: Replica, now_s: float) -> None:
        for request in replica.finish(lambda request: self._first_token(request, now_s)):
            number = int(request.id)
            left = self._asked[number].tokens_out - 1
            if replica.role == "prefill" and left:
                self._hand_over(number, left, now_s)
                continue
            self._end_s[number] = now_s
            following = next(self._unsent, None)
            if following is not None:
                self._at(now_s, partial(self._come, following))
        self._computing.discard(replica.devices)
        self._begin_step(replica.devices, now_s)

    def _first_token(self, request: Request, now_s: float) -> None:
        self._first_s.setdefault(int(request.id), now_s)

    def _hand_over(self, number: int, left: int, now_s: float) -> None:
        """Sends a prompt's cache, and its first token, to where the answer is computed."""
        tokens_in = self._asked[number].tokens_in
        replica = min(self._back[self._models[number]], key=lambda r: r.load)
        ready_s = now_s + self._transfer_s(tokens_in)
        self._at(ready_s, lambda at_s: self._add(replica, number, tokens_in + 1, left, at_s))

    def _served(self, number: int) -> Served:
        asked, came_s = self._asked[number], self._came_s[number]
        first_s = self._first_s[number]
        later = asked.tokens_out - 1
        tpot_s = (self._end_s[number] - first_s) / later if later and math.isfinite(first_s) else 0.0
        return Served(came_s, first_s - came_s, tpot_s, asked.tokens_in, asked.tokens_out)
