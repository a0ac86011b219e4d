"""A model behind `meshwright serve`, from its folder to its tokens."""

import os
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import openai
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.zoo import llama
from tests.compiling import FLAGS
from tests.serving.server.running import Running, first_line, ids, write_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.devices]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model of one layer, with a token for every byte."""
    folder = tmp_path_factory.mktemp("served") / "random"
    config = replace(zoo.build("llama-tiny", layers=1).config, vocab=264, dtype="float32")
    mw.hf.save(folder, llama.init(config, jax.random.key(0)), config)
    write_tokenizer(folder)
    return folder


def continued(folder, tokens, count):
    """The likeliest tokens, by the model as a whole."""
    model, tokens = mw.hf.load(folder), list(tokens)
    padded, forward = np.zeros((1, 32), np.int32), jax.jit(model.forward)
    for at in range(len(tokens), len(tokens) + count):
        padded[0, : len(tokens)] = tokens
        tokens.append(int(forward(model.params, padded)[0, at - 1].argmax()))
    return tokens[-count:]


def test_a_model_answers_as_it_is(folder):
    sizes = ["--max-len", "48", "--slots", "2", "--chunk", "16", "--queue", "4", "--dtype", "float32"]
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "serve", str(folder), "--port", "0", *sizes],
        env=os.environ | {"XLA_FLAGS": FLAGS, "MESHWRIGHT_CACHE": str(folder.parent)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        server = Running(process, int(first_line(process, " at http://").rsplit(":", 1)[1]), [])
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            expected = continued(folder, ids("a model"), 12)
            asked = {"model": "random", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
            for n in (1, 3):
                answer = client.completions.create(prompt="a model", n=n, logprobs=0, **asked)
                for choice in answer.choices:
                    assert len(choice.logprobs.token_logprobs) == 12 and max(choice.logprobs.token_logprobs) < 0
                    assert choice.logprobs.tokens == [bytes_of(token) for token in expected]
            drawn = {"model": "random", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 5}
            texts = [client.chat.completions.create(**drawn).choices[0].message.content for _ in range(2)]
            assert texts[0] == texts[1]
            events = client.chat.completions.create(stream=True, **drawn)
            assert "".join(event.choices[0].delta.content or "" for event in events) == texts[0]
            with pytest.raises(openai.BadRequestError, match="the model takes 48"):
                client.completions.create(prompt="a" * 60, **asked)
        assert server.engine()["blocks_used"] == 0
        assert any((folder.parent / "programs").iterdir())  # for the next worker
        server.terminate()
        assert process.wait(60) == 0, process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def bytes_of(token):
    """A token of the vocabulary of bytes as the server names it."""
    byte = token - 3
    special = {0: "</s>", 1: "<dies>", 2: "<fails>"}
    return special.get(token) or (chr(byte) if byte < 0x80 else "" if byte > 255 else f"bytes:\\x{byte:02x}")
