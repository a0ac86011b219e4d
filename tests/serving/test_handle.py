"""Tokens in the hands of whoever asked for them, by threads and by asyncio."""

import asyncio
from threading import Thread

import pytest

from meshwright.errors import ServingError
from meshwright.serving.handle import Handle
from meshwright.serving.requests import EngineStopped, Sampling, Token


def engine(handle, count, reason="length"):
    def work():
        for number in range(count):
            handle.give(Token(number))
        handle.end(reason, "the device is gone")

    thread = Thread(target=work)
    thread.start()
    return thread


def test_tokens_come_by_for():
    handle = Handle(1, cancel=lambda id: None)
    thread = engine(handle, 500)
    assert [token.id for token in handle] == list(range(500))
    assert handle.finish_reason == "length"
    thread.join()


def test_tokens_come_by_async_for():
    async def read():
        handle = Handle(1, cancel=lambda id: None)
        thread = engine(handle, 500)
        numbers = [token.id async for token in handle]
        thread.join()
        return numbers

    assert asyncio.run(read()) == list(range(500))


def test_a_listener_is_told_at_once():
    told = []
    handle = Handle(1, cancel=lambda id: None, listener=lambda handle, token: told.append(token and token.id))
    engine(handle, 3).join()
    assert told == [0, 1, 2, None]


def test_an_engine_that_ends_is_an_error():
    handle = Handle(1, cancel=lambda id: None)
    thread = engine(handle, 2, "error")
    tokens = iter(handle)
    assert [next(tokens).id, next(tokens).id] == [0, 1]
    with pytest.raises(EngineStopped, match="the device is gone"):
        next(tokens)
    thread.join()


def test_cancelling_names_the_request():
    cancelled = []
    Handle(7, cancel=cancelled.append).cancel()
    assert cancelled == [7]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; give at least 1"),
        ({"min_tokens": 9}, "min_tokens is 9; give between 0 and max_tokens"),
        ({"temperature": -1}, "temperature is -1; give a number from 0"),
        ({"temperature": float("nan")}, "temperature is nan; give a number from 0"),
        ({"top_k": -1}, "top_k is -1; give at least 1, or 0 for all tokens"),
        ({"top_p": 0}, "top_p is 0; give above 0 and at most 1"),
        ({"logprobs": 21}, "logprobs is 21; give between 0 and 20"),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(ServingError, match=message):
        Sampling(**({"max_tokens": 8} | change))
