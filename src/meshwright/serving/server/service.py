"""Answers one request: from its body to the last token, or to the refusal."""

from collections.abc import AsyncIterator, Callable, Mapping
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from meshwright.hf.tokenizer import Tokenizer
from meshwright.serving.requests import EngineStopped, Overloaded
from meshwright.serving.server.answers import Writer, data_event
from meshwright.serving.server.asking import Ask, read_chat, read_completion, tokenise
from meshwright.serving.server.generation import Generation, Piece
from meshwright.serving.server.messages import Ready
from meshwright.serving.server.metrics import Metrics
from meshwright.serving.server.process import Worker
from meshwright.serving.server.refusals import refusal
from meshwright.serving.server.settings import ServerSettings
from meshwright.serving.server.transport import EventStream, read_object, while_connected

Read = Callable[[Mapping[str, Any], ServerSettings, Ready], Ask]


class Service:
    """One model behind the two addresses that generate.

    Attributes:
        settings: How the server is reached.
        worker: The engine.
        metrics: What is counted.
    """

    def __init__(self, settings: ServerSettings, tokenizer: Tokenizer, worker: Worker):
        self.settings, self.worker = settings, worker
        self.metrics = Metrics(worker)
        self._tokenizer = tokenizer

    async def completions(self, request: Request) -> Response:
        """`/v1/completions`."""
        return await self._answer(request, read_completion)

    async def chat(self, request: Request) -> Response:
        """`/v1/chat/completions`."""
        return await self._answer(request, read_chat)

    async def _answer(self, request: Request, read: Read) -> Response:
        began_s, engine = monotonic(), self._engine()
        if self.worker.open >= engine.most_open:  # before its body is read: a busy server does little for each
            raise refusal(Overloaded(f"{self.worker.open} requests are open, as many as are taken; try again later"))
        ask = read(await read_object(request, self.settings), self.settings, engine)
        prompts = [await tokenise(prompt, self._tokenizer) for prompt in ask.prompts]
        writer = Writer(ask, prompts, self.settings.name, self._tokenizer)
        generation = Generation(ask, prompts, began_s, self._tokenizer, self.metrics)
        try:
            if ask.max_tokens != 0:  # 0 asks for the echo alone
                await generation.submit(self.worker, engine)
            if ask.stream:
                return EventStream(self._events(writer, generation), lambda: generation.cancel(self.worker))
            pieces = await while_connected(request.receive, _all(generation.pieces(self.worker)))
        except BaseException:
            generation.cancel(self.worker)
            raise
        return JSONResponse(writer.whole(pieces, generation.num_choices, generation.usage))

    async def _events(self, writer: Writer, generation: Generation) -> AsyncIterator[str]:
        """The events of a stream; what goes wrong by now can only be an event, too."""
        try:
            for event in writer.opening(generation.num_choices):
                yield event
            async for piece in generation.pieces(self.worker):
                yield writer.event(piece)
            for event in writer.closing(generation.usage):
                yield event
        except EngineStopped as error:
            yield data_event(refusal(error).body())

    def _engine(self) -> Ready:
        if self.worker.ready is None:
            raise refusal(EngineStopped("the model is being loaded; try again in some seconds"))
        return self.worker.ready


async def _all(pieces: AsyncIterator[Piece]) -> list[Piece]:
    return [piece async for piece in pieces]
