"""The loop that schedules, runs and delivers; see `Engine`."""

import atexit
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshwright.errors import ServingError
from meshwright.progress import Say, progress
from meshwright.serving.engine.buckets import Buckets, length_ladder
from meshwright.serving.engine.client import Client
from meshwright.serving.engine.placement import Placement
from meshwright.serving.engine.programs import Parcel, Programs
from meshwright.serving.handle import Handle, Listener
from meshwright.serving.models import Cache, Decoder, Draw, Drawn, Kind, SlotCache
from meshwright.serving.models.sampling import MOST_STOPS
from meshwright.serving.models.shaping import Shape
from meshwright.serving.requests import EngineStopped, Sampling, Stats, Token
from meshwright.serving.scheduling import Limits, Request, Scheduler, Slice, StepPlan
from meshwright.zoo.layers import PyTree

log = logging.getLogger("meshwright")
_STEPS_AVERAGED = 32


class Engine:
    """Serves one model: `submit` a prompt, and read its tokens from the handle.

    A thread of its own schedules a step, sends it to the device, and only then takes the tokens of the step before: the
    device always has its next step, and tokens go from one step to the next without passing the host.

    Args:
        config: The zoo's `Config` of the model.
        params: Its parameters, in the dtype they are used in.
        limits: What requests share.
        cache: What keeps keys and values; it must hold what `limits` says.
        placements: Where parameters and cache are; by default on the first device. Several are stages of layers.
        eos: Tokens that end a text.
        lengths: The lengths that chunks of prompts are padded to, beside that of `limits`; by default four times apart.
        on_progress: Is told what is compiled.
    """

    def __init__(
        self,
        config: Any,
        params: PyTree,
        limits: Limits,
        cache: Cache,
        *,
        placements: Sequence[Placement] = (),
        eos: Sequence[int] = (),
        lengths: Sequence[int] | None = None,
        on_progress: Say | None = None,
    ):
        self.limits, self.eos, self.vocab = limits, tuple(eos), config.vocab
        chosen = length_ladder(limits.chunk) if lengths is None else sorted({*lengths, limits.chunk})
        width = cache.width(limits.max_len)
        self._buckets = Buckets(limits, isinstance(cache, SlotCache), width, tuple(chosen), cache.least_rows)
        decoder = Decoder.of(config, cache)
        self._programs = Programs(decoder, params, limits.slots, placements or [Placement.single(decoder)])
        with progress(on_progress) as say:
            self._programs.compile(self._buckets.shapes(), self._buckets.draws(), limits.most_tokens(), say)
        self._start()

    def twin(self) -> "Engine":
        """Another engine with the same programs and parameters and a cache of its own, on the same devices."""
        other = object.__new__(Engine)
        other.limits, other.eos, other.vocab, other._buckets = self.limits, self.eos, self.vocab, self._buckets
        other._programs = self._programs.twin()
        other._start()
        return other

    def _start(self) -> None:
        self._scheduler = Scheduler(self.limits)
        self._ids = itertools.count()
        self._clients: dict[int, Client] = {}
        self._lock = threading.Condition()  # of everything that the loop and callers share
        self._refusing = ""  # why no more requests are taken
        self._closing = False
        self._steps = self._tokens_out = 0
        self._step_s = 0.0
        self._thread = threading.Thread(target=self._run, name="meshwright engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a step that runs while the interpreter ends would crash it

    @property
    def load(self) -> int:
        """How many requests are open."""
        return len(self._clients)

    def checked(self, prompt: Sequence[int]) -> list[int]:
        """The tokens of a prompt, all of which the model knows."""
        tokens = [int(token) for token in prompt]
        outside = next((token for token in tokens if not 0 <= token < self.vocab), None)
        if outside is not None:
            raise ServingError(f"the prompt has token {outside}, and the vocabulary goes from 0 to {self.vocab - 1}")
        return tokens

    def found(self, names: Sequence[bytes]) -> int:
        """How many of a prompt's pieces, from the first on, the cache has now; their names are `Request.names`."""
        with self._lock:
            return self._scheduler.found(names)

    def compile_transfers(self, lengths: Sequence[int], on_progress: Say | None = None) -> None:
        """Prepares to give prompts that are computed to other engines, and to take them; before the first request."""
        with progress(on_progress) as say:
            self._programs.compile_parcels(lengths, say)

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        listener: Listener | None = None,
        *,
        send: Callable[[Parcel], None] | None = None,
        parcel: Parcel | None = None,
    ) -> Handle:
        """Takes a request.

        Args:
            prompt: Its tokens.
            sampling: How it goes on.
            listener: Is told of each token in place of the handle.
            send: Is given the keys and values of the prompt, and the request ends after the first token: another engine
                goes on with it.
            parcel: What another engine gave: the prompt but for its last token, which is the first of the answer.

        Raises:
            Overloaded: The queue is full.
            ServingError: It is too long, or asks for what the engine does not do.
            EngineStopped: The engine takes no more requests.
        """
        tokens = self.checked(prompt)
        ends = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos)]
        stops = tuple(dict.fromkeys(token for token in ends if 0 <= token < self.vocab))
        outside = next((token for token, _ in sampling.logit_bias if not 0 <= token < self.vocab), None)
        if outside is not None:
            raise ServingError(f"logit_bias has token {outside}, and the vocabulary goes from 0 to {self.vocab - 1}")
        if sampling.min_tokens and len(stops) > MOST_STOPS:
            raise ServingError(
                f"{len(stops)} tokens would end the text, and min_tokens can hold {MOST_STOPS} back; give fewer "
                "stop_token_ids, or min_tokens=0"
            )
        with self._lock:
            if self._refusing:
                raise EngineStopped(self._refusing)
            number = next(self._ids)
            most = 1 if send is not None else sampling.max_tokens - (parcel is not None)
            request = Request(number, tokens, most, time.monotonic(), arrived=parcel.tokens if parcel else 0)
            handle = Handle(number, self._cancel, listener)
            client = Client(handle, sampling, frozenset(stops), send, parcel, int(parcel is not None))
            self._scheduler.add(request)  # last: what it has taken must have a client
            self._clients[number] = client
            self._lock.notify_all()
        return handle

    def stats(self) -> Stats:
        """How the engine does now."""
        with self._lock:
            scheduler = self._scheduler
            return Stats(
                running=scheduler.running,
                waiting=scheduler.waiting,
                slots=self.limits.slots,
                blocks_used=scheduler.pool.used,
                blocks=scheduler.pool.blocks,
                tokens_in=scheduler.prompt_tokens,
                prefix_hits=scheduler.cached_tokens,
                tokens_out=self._tokens_out,
                preemptions=scheduler.preemptions,
                steps=self._steps,
                step_s=self._step_s,
            )

    def drain(self, timeout_s: float | None = None) -> bool:
        """Takes no more requests and waits for those that are open; returns whether all have ended in time."""
        with self._lock:
            self._refusing = self._refusing or "the engine is being drained and takes no more requests"
            return self._lock.wait_for(lambda: not self._clients, timeout_s)

    def close(self) -> None:
        """Ends the engine; requests that are open are cancelled."""
        with self._lock:
            self._refusing = self._refusing or "the engine is closed"
            self._closing = True
            for number in list(self._clients):
                self._scheduler.cancel(number)
                self._end(number, "cancelled")
            self._lock.notify_all()
        self._thread.join()
        atexit.unregister(self.close)

    def _cancel(self, number: int) -> None:
        with self._lock:
            if number in self._clients:
                self._scheduler.cancel(number)
                self._end(number, "cancelled")

    def _end(self, number: int, reason: str, error: str = "") -> None:
        self._clients.pop(number).handle.end(reason, error)
        self._lock.notify_all()

    def _run(self) -> None:
        """The loop; whatever goes wrong in it ends all requests with what it was."""
        try:
            self._loop()
        except Exception as error:
            log.exception("the engine has failed")
            with self._lock:
                self._refusing = f"the engine has failed: {type(error).__name__}: {error}"
                for number in list(self._clients):
                    self._end(number, "error", self._refusing)

    def _loop(self) -> None:
        flying: _Flight | None = None
        landed = time.perf_counter()
        while True:
            with self._lock:
                if flying is None and not self._clients and not self._closing:
                    self._lock.wait_for(lambda: self._clients or self._closing)
                    landed = time.perf_counter()
                if self._closing:
                    return
                plan = self._scheduler.schedule()
                draws = {piece: self._draw_of(piece) for piece in plan.slices if piece.samples}
                arrivals = [(piece, self._clients[int(piece.request.id)]) for piece in plan.slices if piece.arrives]
            with self._programs.turn:
                following = self._launch(plan, draws, arrivals) if plan.slices else None
            if flying is not None:
                self._land(flying)
                now = time.perf_counter()
                self._step_s += (now - landed - self._step_s) / min(self._steps, _STEPS_AVERAGED)
                landed = now
            flying = following

    def _draw_of(self, piece: Slice) -> "_Draw":
        client = self._clients[int(piece.request.id)]
        return _Draw(client, piece.request.num_generated - 1 + client.begun)

    def _launch(
        self, plan: StepPlan, draws: "Mapping[Slice, _Draw]", arrivals: Sequence[tuple[Slice, Client]]
    ) -> "_Flight":
        """Sends a step to the device, and the draws of its tokens."""
        flight = _Flight(plan, draws, [])
        for source, target in plan.copies:
            self._programs.copy(source, target)
        for piece, one in draws.items():
            if one.client.shape is not None and not piece.follows:  # its slot's counts are of another, or not begun
                self._programs.begin(piece.slot, *one.client.history(piece.request))
        for piece, client in arrivals:
            assert client.parcel is not None
            self._programs.put(client.parcel, piece.slot, piece.block_table)
            client.parcel = None
        for call in self._buckets.calls(plan):
            rows, prompts = self._programs.step(call.shape, self._buckets.packed(call))
            for scores, numbers, pieces in (
                (rows, self._buckets.row_numbers(call), call.rows),
                (prompts, range(len(call.prompts)), call.prompts),
            ):
                places = [place for place in zip(numbers, pieces, strict=True) if place[1].samples]
                if places:
                    flight.results.append((self._sample(scores, places, draws), places))
        for piece, one in draws.items():
            if one.client.send is not None:
                one.client.send(self._programs.take(piece.request.num_prompt, piece.slot, piece.block_table))
        return flight

    def _sample(self, scores: jax.Array, places: "Sequence[_Place]", draws: "Mapping[Slice, _Draw]") -> jax.Array:
        packed = Draw.blank(scores.shape[0], self.limits.slots)
        kind = max(draws[piece].client.kind for _, piece in places)
        shapes = Shape.blank(len(packed)) if kind is Kind.SHAPED else None
        for row, piece in places:
            one = draws[piece]
            one.client.fill(packed[row], piece.slot, one.index)
            if shapes is not None and one.client.shape is not None:
                shapes[row] = one.client.shape
        return self._programs.draw(kind, scores, packed, shapes)

    def _land(self, flight: "_Flight") -> None:
        """Takes the tokens of a step and gives them to whoever asked."""
        tokens: dict[Slice, Token] = {}
        for array, places in flight.results:
            drawn = Drawn.unpack(np.asarray(array))
            for row, piece in places:
                tokens[piece] = flight.draws[piece].client.token(drawn, row)
        with self._lock:
            self._steps += 1
            alive = [piece for piece in flight.draws if piece.request.id in self._clients]
            ended = {
                piece.request.id: "stop"
                for piece in alive
                if flight.draws[piece].client.ends(tokens[piece].id, flight.draws[piece].index)
            }
            over = self._scheduler.commit(flight.plan, [tokens[piece].id for piece in flight.draws], ended)
            for piece in alive:
                handle = flight.draws[piece].client.handle
                handle.cached_tokens = piece.request.cached_tokens
                handle.give(tokens[piece])
            self._tokens_out += len(alive)
            for request in over:
                assert request.finish_reason is not None
                self._end(int(request.id), request.finish_reason)


_Place = tuple[int, Slice]  # a row of some scores, and what it is of


@dataclass(frozen=True)
class _Draw:
    """Whose token a slice draws, and which of them."""

    client: Client
    index: int


@dataclass(frozen=True)
class _Flight:
    """A step on the device: what it draws, with the row of each slice in it."""

    plan: StepPlan
    draws: Mapping[Slice, _Draw]
    results: list[tuple[jax.Array, Sequence[_Place]]]
