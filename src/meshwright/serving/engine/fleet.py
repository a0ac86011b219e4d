"""Several engines as one: replicas that requests choose between, and prompts and answers on engines of their own."""

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from threading import Lock

from meshwright.serving.engine.engine import Engine
from meshwright.serving.engine.programs import Parcel
from meshwright.serving.handle import Handle, Listener
from meshwright.serving.requests import EngineStopped, Sampling, Stats, Token
from meshwright.serving.scheduling import Request

#: A replica may have so large a part of its slots more requests than the least busy one, for a prompt that it knows:
#: each running sequence makes the steps of all others a little longer, and a system prompt that all requests have in
#: common must not bring them all to one replica. By the mean times to a first token of ten simulated loads
#: (`benchmarks/serving_routing.py`), a quarter is the best, an eighth 3% and no limit 4% behind, and a router that does
#: not ask what is known takes 2.2 times as long.
_UNEVEN = 4


class Fleet:
    """Engines of one model, with an engine's interface.

    Args:
        engines: Those that compute prompts and, unless there are `backs`, answers.
        backs: Those that go on with the answers, after the first token.
    """

    def __init__(self, engines: Sequence[Engine], backs: Sequence[Engine] = ()):
        self._fronts, self._backs = tuple(engines), tuple(backs)
        one, running = self._fronts[0], self._backs or self._fronts
        slots = sum(engine.limits.slots for engine in running)
        queue = sum(engine.limits.queue for engine in self._fronts)
        smallest = min((*self._fronts, *self._backs), key=lambda engine: engine.limits.most_tokens()).limits
        budget = max(smallest.token_budget, slots)
        self.limits = replace(smallest, slots=slots, queue=queue, token_budget=budget)
        self.vocab, self.eos = one.vocab, one.eos
        self._ids = itertools.count()

    def submit(self, prompt: Sequence[int], sampling: Sampling, listener: Listener | None = None) -> Handle:
        """Takes a request, as `Engine.submit` does: on the engine that knows most of it, of those that have time."""
        prompt = self._fronts[0].checked(prompt)
        front = _chosen(self._fronts, prompt)
        if not self._backs or sampling.max_tokens == 1:
            return front.submit(prompt, sampling, listener)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        relay = _Relay(next(self._ids), prompt, replace(sampling, seed=seed), self._backs, listener)
        return relay.begin(front)

    def stats(self) -> Stats:
        """How they do, together."""
        fronts, backs = ([engine.stats() for engine in engines] for engines in (self._fronts, self._backs))
        every = fronts + backs

        def total(name: str, stats: Sequence[Stats]) -> int:
            return sum(getattr(one, name) for one in stats)

        counted = ("running", "waiting", "blocks_used", "blocks", "tokens_out", "preemptions", "steps")
        return Stats(
            slots=self.limits.slots,
            tokens_in=total("tokens_in", fronts),
            prefix_hits=total("prefix_hits", fronts),
            step_s=max(one.step_s for one in every),
            **{name: total(name, every) for name in counted},
        )

    def drain(self, timeout_s: float | None = None) -> bool:
        """Takes no more requests and waits for those that are open; returns whether all have ended in time."""
        ended = [engine.drain(timeout_s) for engine in (*self._fronts, *self._backs)]
        return all(ended)

    def close(self) -> None:
        """Ends all engines; requests that are open are cancelled."""
        for engine in (*self._fronts, *self._backs):
            engine.close()


def _least(engines: Sequence[Engine]) -> Engine:
    return min(engines, key=lambda engine: engine.load)


def _chosen(engines: Sequence[Engine], prompt: list[int]) -> Engine:
    """The engine for a prompt: of those that are little busier than the least busy one, the one that knows most of it.

    Only engines with a free slot are asked; where none has one, it is the one with the fewest requests.
    """
    least = _least(engines)
    slots = least.limits.slots
    most = min(least.load + max(1, slots // _UNEVEN), slots - 1)
    near = [engine for engine in engines if engine.load <= most]
    if len(near) < 2 or not prompt:
        return least
    names = Request(0, prompt, 1).names(least.limits.piece)
    return max(near, key=lambda engine: (engine.found(names), -engine.load))


class _Relay:
    """One request that passes from an engine for prompts to one for answers, as one handle."""

    def __init__(
        self, number: int, prompt: list[int], sampling: Sampling, backs: Sequence[Engine], listener: Listener | None
    ):
        self._prompt, self._sampling, self._backs = prompt, sampling, backs
        self._handle = Handle(number, self._cancel, listener)
        self._current: Handle | None = None
        self._parcel: Parcel | None = None
        self._first: Token | None = None
        self._cancelled = False
        self._lock = Lock()

    def begin(self, front: Engine) -> Handle:
        handle = front.submit(self._prompt, self._sampling, self._of_front, send=partial(setattr, self, "_parcel"))
        with self._lock:
            self._current = self._current or handle
        return self._handle

    def _cancel(self, number: int) -> None:
        with self._lock:
            self._cancelled, current = True, self._current
        if current is not None:
            current.cancel()

    def _of_front(self, handle: Handle, token: Token | None) -> None:
        if token is not None:
            self._first = token
            self._handle.cached_tokens = handle.cached_tokens
            self._handle.give(token)
        elif handle.finish_reason == "length":
            self._hand_over()
        else:
            self._handle.end(handle.finish_reason or "error", handle.error)

    def _hand_over(self) -> None:
        """Hands the request to where answers are computed."""
        assert self._parcel is not None and self._first is not None
        prompt = [*self._prompt, self._first.id]
        try:
            handle = _least(self._backs).submit(prompt, self._sampling, self._of_back, parcel=self._parcel)
        except EngineStopped as error:
            self._handle.end("error", str(error))
            return
        self._parcel = None
        with self._lock:
            self._current, cancelled = handle, self._cancelled
        if cancelled:
            handle.cancel()

    def _of_back(self, handle: Handle, token: Token | None) -> None:
        if token is not None:
            self._handle.give(token)
        else:
            self._handle.end(handle.finish_reason or "error", handle.error)
