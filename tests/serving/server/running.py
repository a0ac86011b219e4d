"""Starts servers in processes of their own, with a tokenizer of bytes and the engine without a model."""

import http.client
import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from meshwright.serving.server.text import BYTE_OF_LETTER

ROOT = Path(__file__).parents[3]
SPECIAL = ("</s>", "<dies>", "<fails>")  # see fake_engine.py
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}{% endfor %}{% if add_generation_prompt %}[assistant] a{% endif %}"
)
START = """
import sys, json
from meshwright.hf.tokenizer import read_tokenizer
from meshwright.serving.server import Recipe, ServerSettings, serve
from pathlib import Path
folder, engine, settings = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
factory = engine.pop("factory", "tests.serving.server.fake_engine:make")
serve(Recipe(factory, engine), read_tokenizer(folder), ServerSettings(**settings))
"""


def write_tokenizer(folder, template=TEMPLATE):
    """A token for every byte, after the special ones."""
    names = sorted(BYTE_OF_LETTER, key=BYTE_OF_LETTER.__getitem__)
    vocab = {name: number for number, name in enumerate([*SPECIAL, *names])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIAL))
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


VOCAB = len(SPECIAL) + 256


def ids(text):
    """The tokens of a text."""
    return [byte + len(SPECIAL) for byte in text.encode()]


@dataclass
class Running:
    process: subprocess.Popen
    port: int
    lines: list

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path, body=None, method=None, headers=None, timeout=30):
        """One request on a connection of its own: status, headers, and the body, as JSON where it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = json.dumps(body).encode() if isinstance(body, dict | list) else body
            kind = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method or ("GET" if body is None else "POST"), path, data, kind | (headers or {}))
            answer = connection.getresponse()
            text = answer.read().decode()
            is_json = answer.headers.get_content_type() == "application/json"
            return answer.status, answer.headers, json.loads(text) if is_json else text
        finally:
            connection.close()

    def complete(self, **body):
        status, _, answer = self.ask("/v1/completions", {"prompt": "a", "temperature": 0} | body)
        assert status == 200, answer
        return answer

    def engine(self):
        while (figures := self.ask("/status")[2]["engine"]) is None:  # before the worker's first report
            pass
        return figures

    def worker(self):
        """The process of the engine."""
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)

    @contextmanager
    def stream(self, **body):
        """The events of an answer as they come; the connection is closed at the end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = json.dumps({"prompt": "a", "temperature": 0, "stream": True, "ignore_eos": True} | body)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        yield (line[len("data: ") : -1].decode() for line in answer if line.startswith(b"data: "))
        connection.close()
        answer.close()

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)


def first_line(process, mark, lines=None):
    """Reads what a process says up to a line with a mark."""
    lines = [] if lines is None else lines
    for line in process.stderr:
        lines.append(line)
        if mark in line:
            return line
    raise AssertionError("".join(lines))


@contextmanager
def running(folder, *, engine=None, code=0, is_ready=True, **settings):
    """A server, when it is ready; at the end it must leave with an exit code, after SIGTERM."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", START, str(write_tokenizer(folder))),
            *(json.dumps({"vocab": VOCAB} | (engine or {})), json.dumps({"name": "tiny", "port": 0} | settings)),
        ],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = []
    try:
        port = int(first_line(process, " at http://", lines).rsplit(":", 1)[1]) if is_ready else settings["port"]
        server = Running(process, port, lines)
        yield server
        if process.poll() is None:
            server.terminate()
        lines += process.communicate(timeout=60)[1].splitlines(keepends=True)
        assert process.returncode == code, "".join(lines)
        assert not any("Traceback" in line for line in lines), "".join(lines)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
