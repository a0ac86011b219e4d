"""An engine without a model: each token is the one after the last. The scheduler is the real one."""

import itertools
import os
import random
import signal
import threading
import time

from meshwright.serving.handle import Handle
from meshwright.serving.requests import EngineStopped, Stats, Token
from meshwright.serving.scheduling import Limits, Request, Scheduler

LIMITS = {"slots": 8, "block_size": 4, "blocks": 256, "chunk": 64, "token_budget": 64, "queue": 16, "max_len": 256}
#: A prompt that begins with this token ends the worker's process; with this one, the engine.
DIES, FAILS = 1, 2
EOS = 0


class FakeEngine:
    def __init__(self, vocab, eos=EOS, step_s=0.001, **limits):
        self.limits, self.vocab, self.eos, self.step_s = Limits(**(LIMITS | limits)), vocab, eos, step_s
        self.scheduler, self.lock = Scheduler(self.limits), threading.Lock()
        self.ids, self.clients, self.steps, self.tokens_out, self.stopped = itertools.count(), {}, 0, 0, False
        threading.Thread(target=self.run, daemon=True).start()

    def submit(self, prompt, sampling, listener=None):
        if prompt[0] == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        with self.lock:
            if self.stopped:
                raise EngineStopped("the engine is gone")
            request = Request(next(self.ids), prompt, sampling.max_tokens)
            self.scheduler.add(request)
            handle = Handle(request.id, self.cancel, listener)
            self.clients[request.id] = handle, sampling
        return handle

    def cancel(self, id):
        with self.lock:
            self.scheduler.cancel(id)
            self.end(id, "cancelled")

    def end(self, id, reason, error=""):
        handle, _ = self.clients.pop(id, (None, None))
        if handle is not None:
            handle.end(reason, error)

    def stats(self):
        with self.lock:
            pool, scheduler = self.scheduler.pool, self.scheduler
            return Stats(
                running=scheduler.running,
                waiting=scheduler.waiting,
                slots=self.limits.slots,
                blocks_used=pool.used,
                blocks=pool.blocks,
                tokens_in=scheduler.prompt_tokens,
                prefix_hits=scheduler.cached_tokens,
                tokens_out=self.tokens_out,
                preemptions=scheduler.preemptions,
                steps=self.steps,
                step_s=self.step_s,
            )

    def run(self):
        while True:
            time.sleep(self.step_s)
            with self.lock:
                self.step()

    def step(self):
        plan = self.scheduler.schedule()
        tokens, ended = [], {}
        for piece in plan.slices:
            if piece.request.prompt[0] == FAILS:
                self.stopped = True
                for id in list(self.clients):
                    self.end(id, "error", "the device is lost")
                return
            if piece.samples:
                token = self.sample(piece.request, self.clients[piece.request.id][1])
                tokens.append(token.id)
                sampling, count = self.clients[piece.request.id][1], piece.request.num_generated
                stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (self.eos,))}
                if token.id in stops and count >= sampling.min_tokens:
                    ended[piece.request.id] = "stop"
                handle = self.clients[piece.request.id][0]
                handle.cached_tokens = piece.request.cached_tokens
                handle.give(token)
                self.tokens_out += 1
        self.steps += bool(plan.slices)
        for request in self.scheduler.commit(plan, tokens, ended):
            self.end(request.id, request.finish_reason)

    def sample(self, request, sampling):
        """The last token and one; by a temperature, any: the same for the same seed."""
        known = request.num_prompt + len(request.generated)
        last = request.tokens(known - 1, 1)[0]
        if sampling.temperature and sampling.seed is not None:
            number = random.Random(f"{sampling.seed} {known}").randrange(3, self.vocab)
        else:
            number = (last + 1) % self.vocab
        if sampling.logprobs is None:
            return Token(number)
        return Token(number, -0.5, tuple(((number + at) % self.vocab, -0.5 - at) for at in range(sampling.logprobs)))


def make(load_s=0.0, **options):
    time.sleep(load_s)
    return FakeEngine(**options)
