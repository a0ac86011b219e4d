"""`meshwright serve`: mistakes are one line, before anything is loaded."""

import socket
import sys

import pytest
from typer.testing import CliRunner

from meshwright.cli.app import app

for name in ("jinja2", "prometheus_client", "starlette", "tokenizers", "uvicorn"):
    pytest.importorskip(name, reason="the server needs the extra [serve]")

from tests.serving.server.running import write_tokenizer  # noqa: E402


def refused(*arguments):
    """The one line that a command ends with."""
    result = CliRunner().invoke(app, ["serve", *map(str, arguments)])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_what_cannot_be_served(tmp_path):
    assert "does not exist; give the folder that holds config.json" in refused(tmp_path / "nowhere")
    assert f"{tmp_path} has no tokenizer.json" in refused(tmp_path)
    write_tokenizer(tmp_path)
    assert "port is 70000; give one between 0 and 65535" in refused(tmp_path, "--port", 70000)
    assert "the API key has spaces" in refused(tmp_path, "--api-key", "a b")
    assert "describe a load; give its --rate, too" in refused(tmp_path, "--tokens-in", 30)
    assert "rate is 0.0; give requests per second above 0" in refused(tmp_path, "--rate", 0)
    assert "drain_s is -1.0; give 0 or more" in refused(tmp_path, "--drain", -1)
    assert "cannot listen at nowhere.invalid port 0" in refused(tmp_path, "--host", "nowhere.invalid", "--port", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(tmp_path, "--port", port)
        assert f"cannot listen at 127.0.0.1 port {port} (Address already in use); give another --host or --port" in line


def test_a_folder_without_a_model_is_told_by_the_worker(tmp_path):
    assert f"{write_tokenizer(tmp_path)} has no config.json" in refused(tmp_path, "--port", 0)


def test_a_missing_extra_is_one_sentence(tmp_path, monkeypatch):
    for module in [name for name in sys.modules if name.startswith("meshwright.serving.server")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    line = refused(write_tokenizer(tmp_path))
    assert line.endswith("meshwright serve needs uvicorn, which is not installed: pip install 'meshwright[serve]'")
