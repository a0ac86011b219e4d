"""What the server answers, as OpenAI's own client reads it."""

import asyncio

import openai
import pytest

from tests.serving.server.running import ids

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_text_is_continued(client):
    answer = client.completions.create(model="tiny", prompt="a", max_tokens=4, temperature=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("bcde", "length")
    assert answer.object == "text_completion" and answer.model == "tiny"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (1, 4, 5)


def test_a_conversation_goes_on(client):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=3, temperature=0)
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", "bcd")
    assert answer.usage.prompt_tokens == len("[user] hi[assistant] a")


def test_content_may_come_in_parts(client):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert answer.usage.prompt_tokens == len("[user] hi[assistant] a")


def test_a_stream_brings_the_same(client):
    options = {"include_usage": True}
    events = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=5, temperature=0, stream=True, stream_options=options
        )
    )
    *some, last = events
    assert some[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in some) == "bcdef"
    assert [event.choices[0].finish_reason for event in some] == [None] * (len(some) - 1) + ["length"]
    assert last.choices == [] and last.usage.completion_tokens == 5
    assert all(event.usage is None for event in some) and len({event.id for event in events}) == 1
    texts = client.completions.create(model="tiny", prompt="a", max_tokens=5, temperature=0, stream=True)
    assert "".join(event.choices[0].text for event in texts) == "bcdef"


def test_stop_strings_end_an_answer_across_tokens(client):
    answer = client.completions.create(model="tiny", prompt="a", max_tokens=20, temperature=0, stop=["xyz", "efg"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("bcd", "stop")
    events = client.completions.create(model="tiny", prompt="a", max_tokens=20, temperature=0, stop="efg", stream=True)
    assert "".join(event.choices[0].text for event in events) == "bcd"
    more = {"include_stop_str_in_output": True, "min_tokens": 8}
    answer = client.completions.create(model="tiny", prompt="a", max_tokens=9, temperature=0, stop="e", extra_body=more)
    assert answer.choices[0].text == "bcdefghij"


def test_several_prompts_with_several_answers_each(client):
    answer = client.completions.create(model="tiny", prompt=["a", "q"], n=2, max_tokens=2, temperature=0)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "bc"), (1, "bc"), (2, "rs"), (3, "rs")]
    assert answer.usage.prompt_tokens == 2 and answer.usage.completion_tokens == 8
    answer = client.completions.create(model="tiny", prompt=[ids("ab"), ids("x")], max_tokens=1, temperature=0)
    assert [choice.text for choice in answer.choices] == ["c", "y"]
    answer = client.completions.create(model="tiny", prompt=ids("ab"), max_tokens=1, temperature=0)
    assert [choice.text for choice in answer.choices] == ["c"]
    events = client.completions.create(model="tiny", prompt=["a", "q"], max_tokens=3, temperature=0, stream=True)
    texts = ["", ""]
    for event in events:
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == ["bcd", "rst"]


def test_a_seed_draws_the_same_and_each_answer_its_own(client):
    def texts():
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, seed=-4, max_tokens=8)
        return [choice.message.content for choice in answer.choices]

    assert texts() == texts() and len(set(texts())) == 3


def test_probabilities_of_a_conversation(client):
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=2, temperature=0, logprobs=True, top_logprobs=2
    )
    first, second = answer.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("b", -0.5, [ord("b")])
    assert [(one.token, one.logprob) for one in second.top_logprobs] == [("c", -0.5), ("d", -1.5)]


def test_probabilities_of_a_text(client):
    answer = client.completions.create(model="tiny", prompt="a", max_tokens=2, temperature=0, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert (logprobs.tokens, logprobs.token_logprobs, logprobs.text_offset) == (["b", "c"], [-0.5, -0.5], [0, 1])
    assert logprobs.top_logprobs == [{"b": -0.5}, {"c": -0.5}]
    events = client.completions.create(model="tiny", prompt="a", max_tokens=2, temperature=0, logprobs=0, stream=True)
    assert [at for event in events for at in event.choices[0].logprobs.text_offset] == [0, 1]


def test_tokens_that_are_no_text_are_named_by_their_bytes(client):
    answer = client.completions.create(model="tiny", prompt=[0x7F + 3], max_tokens=1, temperature=0, logprobs=2)
    assert answer.choices[0].logprobs.top_logprobs == [{"bytes:\\x80": -0.5, "bytes:\\x81": -1.5}]


def test_the_prompt_may_come_first(client):
    answer = client.completions.create(model="tiny", prompt="a", echo=True, max_tokens=2, temperature=0)
    assert answer.choices[0].text == "abc"
    answer = client.completions.create(model="tiny", prompt=ids("ab"), echo=True, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "length")
    events = client.completions.create(model="tiny", prompt="a", echo=True, max_tokens=2, temperature=0, stream=True)
    assert "".join(event.choices[0].text for event in events) == "abc"


def test_what_vllm_takes_beside(client):
    end = 258 - 2  # two tokens before the end of the vocabulary, after which comes the token of the end
    answer = client.completions.create(model="tiny", prompt=[end], max_tokens=9, temperature=0)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "stop")
    for more, count in (({"ignore_eos": True}, 9), ({"min_tokens": 5}, 9), ({"stop_token_ids": [257]}, 1)):
        more = more | {"top_k": -1, "skip_special_tokens": False}
        answer = client.completions.create(model="tiny", prompt=[end], max_tokens=9, temperature=0, extra_body=more)
        assert answer.usage.completion_tokens == count
    assert (
        "</s>"
        in client.completions.create(
            model="tiny", prompt=[end], max_tokens=9, temperature=0, extra_body={"skip_special_tokens": False}
        )
        .choices[0]
        .text
    )


def test_found_in_the_cache(client):
    for _ in range(2):
        answer = client.completions.create(model="tiny", prompt="cached " * 5, max_tokens=1)
    assert answer.usage.prompt_tokens_details.cached_tokens == 32


def test_the_helpers_of_the_client(client, server):
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, stop="f", temperature=0) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_completion().choices[0].message.content == "bcde"
    assert "content.delta" in kinds and "content.done" in kinds
    raw = client.completions.with_raw_response.create(model="tiny", prompt="a", max_tokens=1, user="me", temperature=0)
    assert raw.headers["content-type"] == "application/json" and raw.parse().choices[0].text == "b"
    everything = {
        **{"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "best_of": 1, "suffix": None, "n": 1},
        **{"top_p": 1, "seed": 1, "stop": None, "stream": False, "echo": False, "logprobs": None},
    }
    assert client.completions.create(model="tiny", prompt="a", max_tokens=1, temperature=0, **everything)

    async def several():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3, "temperature": 0}
            answers = await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(8)))
            stream = await client.chat.completions.create(stream=True, **asked)
            text = "".join([event.choices[0].delta.content or "" async for event in stream])
            return {answer.choices[0].message.content for answer in answers} | {text}

    assert asyncio.run(several()) == {"bcd"}


def test_models(client, server):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "meshwright"
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'; this server has 'tiny'"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.completions.create(model="other", prompt="a")


def test_health_and_figures(server):
    assert server.ask("/health")[::2] == (200, {"status": "ready"})
    server.complete(max_tokens=3)
    text = server.ask("/metrics")[2]
    for name in ("requests_running", "requests_waiting", "cache_blocks_used", "batch_slots"):
        assert f"\nmeshwright_{name} " in text
    for name in ("time_to_first_token", "time_per_output_token"):
        assert f"\nmeshwright_{name}_seconds_bucket" in text
    assert 'meshwright_requests_total{finish_reason="length"}' in text
