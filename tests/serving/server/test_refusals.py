"""What is wrong is refused in one sentence, in OpenAI's shape; never by a mistake of the server's own."""

import http.client
import itertools
import json
import random
import string

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "a"}]
GOOD = {TEXT: {"prompt": "a", "max_tokens": 2}, CHAT: {"messages": MESSAGES, "max_tokens": 2}}
WEIRD = (
    -1,
    0,
    1.5,
    2**70,
    -(2**70),
    1e300,
    "",
    "x",
    "\ud800",
    [],
    [[]],
    [None],
    {},
    {"a": 1},
    True,
    [5, "a"],
    [[5], "a"],
)
FIELDS = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop", "stream", "stream_options"),
    *(
        "logprobs",
        "top_logprobs",
        "echo",
        "stop_token_ids",
        "ignore_eos",
        "model",
        "tools",
        "response_format",
        "logit_bias",
    ),
    *("presence_penalty", "best_of", "prompt", "messages", "chat_template_kwargs", "skip_special_tokens", "nonsense"),
)


def is_refused(status, answer):
    """Whether an answer is a refusal as clients read it."""
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"] and "Traceback" not in error["message"]
    assert len(error["message"]) < 600
    return 400 <= status < 500


def test_two_hundred_malformed_bodies(server):
    cases = list(itertools.product(GOOD, FIELDS, WEIRD))
    random.Random(0).shuffle(cases)
    served = 0
    for path, name, value in cases[:250]:
        status, _, answer = server.ask(path, GOOD[path] | {name: value})
        if status == 200:
            served += 1
        else:
            assert is_refused(status, answer), (path, name, value, status, answer)
    assert served < 120  # 0, "" and [] ask for nothing in some fields
    server.complete(max_tokens=2)


def test_two_hundred_bodies_that_are_no_json(server):
    rng = random.Random(1)
    good = json.dumps(GOOD[TEXT])
    broken = [b"", b"null", b"[]", b'"a"', b"1" * 5000, b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"NaN", b"{}"]
    for _ in range(60):
        at = rng.randrange(len(good))
        broken.append((good[:at] + rng.choice(string.punctuation) + good[at + 1 :]).encode())
        broken.append(rng.randbytes(rng.randrange(60)))
        broken.append(good[:at].encode())
    for body in broken:
        status, _, answer = server.ask(TEXT, body)
        assert status == 200 or is_refused(status, answer), (body, status, answer)
    server.complete(max_tokens=2)


@pytest.mark.parametrize(
    ("path", "change", "status", "message"),
    [
        (TEXT, {"max_tokens": "5"}, 400, 'max_tokens is "5"; give a whole number between 0 and 256'),
        (TEXT, {"max_tokens": 0}, 400, "max_tokens is 0; give at least 1; 0 is for echo"),
        (TEXT, {"temperature": 3}, 400, "temperature is 3; give a number between 0 and 2"),
        (TEXT, {"top_p": 0}, 400, "top_p is 0.0; give above 0 and at most 1"),
        (TEXT, {"min_tokens": 3}, 400, "min_tokens is 3; give between 0 and max_tokens"),
        (TEXT, {"n": 1000}, 400, "n is 1000; give a whole number between 1 and 128"),
        (TEXT, {"prompt": ["a"] * 100, "n": 2}, 400, "n is 2; give at most 128 answers to 100 prompts together"),
        (TEXT, {"prompt": ""}, 400, "the prompt is empty; give at least one token"),
        (TEXT, {"prompt": [1, 2, 300]}, 400, "prompt is [1, 2, 300]; give numbers of tokens, each between 0 and 258"),
        (TEXT, {"prompt": "a" * 300}, 400, "the prompt has 300 tokens, and the model takes 256 with its answer"),
        (
            TEXT,
            {"prompt": "a" * 250, "max_tokens": 9},
            400,
            "max_tokens is 9 and the prompt has 250 tokens",
        ),
        (TEXT, {"prompt": "\ud800"}, 400, "give a text without single surrogates"),
        (TEXT, {"stop": ["x"] * 17}, 400, "give a text or a list of at most 16"),
        (TEXT, {"stop": ""}, 400, 'stop is ""; give texts of 1 to 256 characters'),
        (TEXT, {"logprobs": 21}, 400, "logprobs is 21; give a whole number between 0 and 20"),
        (TEXT, {"logprobs": 1, "echo": True}, 400, "echo with logprobs is not done here"),
        (TEXT, {"best_of": 2}, 400, "best_of is not done here; leave it out"),
        (TEXT, {"frequency_penalty": 3}, 400, "frequency_penalty is 3; give a number between -2 and 2"),
        (TEXT, {"repetition_penalty": 0}, 400, "repetition_penalty is 0; give a number between 0.01 and 100"),
        (TEXT, {"logit_bias": {"-1": 5}}, 400, "give an object whose names are tokens between 0 and"),
        (TEXT, {"logit_bias": {"5": 101}}, 400, "logit_bias.5 is 101; give a number between -100 and 100"),
        (TEXT, {"logit_bias": {str(at): 1 for at in range(301)}}, 400, "give at most 300 tokens"),
        (TEXT, {"response_format": {"type": "json_object"}}, 400, "response_format is not done here"),
        (
            TEXT,
            {"stream_options": {"include_obfuscation": True}},
            400,
            "stream_options.include_obfuscation is not done",
        ),
        (TEXT, {"stream_options": {"nonsense": 1}}, 400, "there is no field 'stream_options.nonsense'"),
        (TEXT, {"tempreature": 1}, 400, "there is no field 'tempreature'; leave it out"),
        (TEXT, {"model": "gpt-9"}, 404, "there is no model 'gpt-9'; this server has 'tiny'"),
        (CHAT, {"messages": []}, 400, "messages is []; give a list of 1 to 10000 messages"),
        (CHAT, {"messages": [{"content": "a"}]}, 400, "each is an object with role and content"),
        (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, 400, "failed: no tools"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "takes texts only"),
        (CHAT, {"top_logprobs": 2}, 400, "top_logprobs is 2; give it together with logprobs: true"),
        (CHAT, {"tools": [{"type": "function"}]}, 400, "tools is not done here; leave it out"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, 400, "no answer and no messages and no self in it"),
    ],
)
def test_a_sentence_says_what_is_wrong(server, path, change, status, message):
    given, _, answer = server.ask(path, GOOD[path] | change)
    assert (given, is_refused(given, answer)) == (status, True)
    assert message in answer["error"]["message"]


#: Values of the fields of OpenAI's client that ask for something; of the others, those of `WEIRD` do.
ASKING = {
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "messages": MESSAGES,
    "model": "tiny",
    "prompt": "b",
    "logit_bias": {"5": 1},
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_object"},
    "reasoning_effort": "low",
    "n": 2,
}


@pytest.mark.parametrize(("path", "params"), [(TEXT, text_params), (CHAT, chat_params)], ids=["text", "chat"])
def test_every_field_that_openai_s_client_knows_is_done_or_refused_by_name(server, path, params):
    for name in params.CompletionCreateParamsBase.__annotations__:
        kinds = [ASKING[name]] if name in ASKING else [0, 1, True, "x", ["x"], {"x": 1}]
        answers = [server.ask(path, GOOD[path] | {name: kind}) for kind in kinds]
        for status, _, answer in answers:
            assert status == 200 or is_refused(status, answer), (name, status, answer)
            assert status == 200 or name in answer["error"]["message"], (name, answer)
            assert status == 200 or answer["error"]["code"] != "unknown_field", name


def test_other_addresses_and_methods(server):
    assert server.ask("/v1/nothing")[0] == 404
    assert server.ask("/../../etc/passwd")[0] == 404
    status, headers, answer = server.ask(TEXT, method="GET")
    assert (status, headers["Allow"]) == (405, "POST") and is_refused(status, answer)
    assert server.ask("/health", method="DELETE")[0] == 405


def test_bodies_must_say_that_they_are_json(server):
    status, _, answer = server.ask(TEXT, b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert status == 415 and "send JSON with Content-Type: application/json" in answer["error"]["message"]


def test_a_body_that_is_announced_too_large_is_not_waited_for(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.putrequest("POST", TEXT)
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(10**12))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413 and "send less" in json.loads(answer.read())["error"]["message"]
    connection.close()


def test_lines_that_are_no_http(server):
    for line in (
        b"nonsense\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.connect()
        connection.sock.sendall(line)
        assert b" 400 " in connection.sock.recv(1000)
        connection.close()
    server.complete(max_tokens=2)
