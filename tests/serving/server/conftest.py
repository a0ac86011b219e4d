"""One server for all tests that leave it as it was."""

import pytest

for _name in ("jinja2", "prometheus_client", "starlette", "tokenizers", "uvicorn"):
    pytest.importorskip(_name, reason="the server needs the extra [serve]")

from tests.serving.server.running import running, write_tokenizer  # noqa: E402


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("tiny")) as server:
        yield server


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    from meshwright.hf.tokenizer import read_tokenizer

    return read_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
