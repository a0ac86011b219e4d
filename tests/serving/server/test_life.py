"""Clients that leave, servers that are full or asked to end, and workers that die."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serving.server.fake_engine import DIES, FAILS
from tests.serving.server.running import ROOT, START, VOCAB, running, write_tokenizer

pytestmark = pytest.mark.slow


def until(condition):
    """Waits for what must come to pass."""
    for _ in range(2000):
        if answer := condition():
            return answer
        time.sleep(0.01)
    raise AssertionError("it does not come to pass")


def test_a_client_that_leaves_frees_its_blocks(tmp_path):
    with running(tmp_path, engine={"step_s": 0.02}) as server:
        with server.stream(max_tokens=250) as events:
            next(events)
            assert until(lambda: server.engine()["running"] == 1)
        until(lambda: server.engine()["running"] == 0)
        engine = server.engine()
        assert engine["blocks_used"] == 0 and engine["tokens_out"] < 250
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        body = json.dumps({"prompt": ["a", "b"], "max_tokens": 250, "ignore_eos": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        until(lambda: server.engine()["running"] == 2)
        connection.close()
        until(lambda: server.engine()["running"] == 0)
        assert server.engine()["tokens_out"] < 500
        assert 'meshwright_requests_total{finish_reason="cancelled"} 3.0' in server.ask("/metrics")[2]


def test_a_full_server_says_when_to_come_again(tmp_path):
    with running(tmp_path, engine={"step_s": 0.02, "slots": 1, "queue": 2}) as server:
        body = {"prompt": "a", "max_tokens": 25}
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda _: server.ask("/v1/completions", body), range(16)))
        statuses = [status for status, _, _ in answers]
        assert set(statuses) == {200, 429} and statuses.count(200) >= 2
        refused = next(answer for answer in answers if answer[0] == 429)
        assert int(refused[1]["Retry-After"]) >= 1
        assert refused[2]["error"]["type"] == "rate_limit_error"
        several = server.ask("/v1/completions", body | {"n": 4})
        assert several[0] == 429
        until(lambda: server.engine()["blocks_used"] == 0)


def test_hundreds_of_connections_at_once_are_served_or_told_to_wait(server):
    async def one():
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = b'{"prompt": "a", "max_tokens": 3}'
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n" + body)
        status = int((await reader.readline()).split()[1])
        await reader.read()
        writer.close()
        return status

    async def all_of_them():
        return await asyncio.gather(*(one() for _ in range(400)))

    statuses = asyncio.run(all_of_them())
    assert set(statuses) <= {200, 429} and 200 in statuses


def test_a_server_that_is_to_end_answers_what_is_open(tmp_path):
    with running(tmp_path, engine={"step_s": 0.02}) as server, server.stream(max_tokens=40) as events:
        text = json.loads(next(events))["choices"][0]["text"]
        server.terminate()
        *some, last = events
        assert last == "[DONE]"
        text += "".join(json.loads(event)["choices"][0]["text"] for event in some)
        assert len(text) == 40
        assert server.process.wait(30) == 0
        with pytest.raises(ConnectionRefusedError):
            server.ask("/health")


def test_a_server_that_is_to_end_does_not_wait_for_ever(tmp_path):
    with running(tmp_path, engine={"step_s": 5.0}, drain_s=1) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.ask, "/v1/completions", {"prompt": "a", "max_tokens": 200})
        until(lambda: server.engine()["waiting"] == 1)
        server.terminate()
        status, _, answer = asked.result()
        assert (status, answer["error"]["message"]) == (503, "the server is ending; the request may be sent again")
        assert server.process.wait(30) == 0


def test_a_server_that_loads_says_so_and_ends_when_it_is_to(tmp_path):
    with running(tmp_path, engine={"load_s": 600}, is_ready=False, port=free_port()) as server:
        until(lambda: answers(server))
        assert server.ask("/health")[::2] == (503, {"status": "loading"})
        status, _, answer = server.ask("/v1/completions", {"prompt": "a"})
        assert (status, answer["error"]["message"]) == (503, "the model is being loaded; try again in some seconds")
        assert "max_model_len" in server.ask("/v1/models")[2]["data"][0]


def answers(server):
    try:
        return server.ask("/health")
    except ConnectionRefusedError:
        return None


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_a_worker_that_is_killed_is_replaced(tmp_path):
    with running(tmp_path, engine={"step_s": 0.02}) as server:
        with server.stream(max_tokens=250) as events, ThreadPoolExecutor(1) as pool:
            next(events)
            whole = pool.submit(server.ask, "/v1/completions", {"prompt": "a", "max_tokens": 250, "ignore_eos": True})
            until(lambda: server.engine()["running"] == 2)
            os.kill(server.worker(), signal.SIGKILL)
            status, headers, answer = whole.result()
            assert (status, headers["Retry-After"]) == (503, "5")
            assert answer["error"]["message"] == "the process of the engine has ended; the request may be sent again"
            *_, last = events
            assert json.loads(last)["error"]["code"] == "unavailable"
        until(lambda: server.ask("/health")[0] == 200)
        assert server.complete(max_tokens=2)["choices"][0]["text"] == "bc"
        assert "meshwright_worker_restarts_total 1.0" in server.ask("/metrics")[2]


def test_a_worker_that_hangs_is_replaced(tmp_path):
    with running(tmp_path, engine={"step_s": 0.02}) as server:
        with ThreadPoolExecutor(1) as pool:
            body = {"prompt": "a", "max_tokens": 250, "ignore_eos": True}
            whole = pool.submit(server.ask, "/v1/completions", body)
            until(lambda: server.engine()["running"] == 1)
            os.kill(server.worker(), signal.SIGSTOP)
            status, headers, answer = whole.result()
            assert (status, headers["Retry-After"]) == (503, "5")
            assert answer["error"]["message"] == "the process of the engine has ended; the request may be sent again"
        until(lambda: server.ask("/health")[0] == 200)
        assert server.complete(max_tokens=2)["choices"][0]["text"] == "bc"


@pytest.mark.parametrize("token", [DIES, FAILS])
def test_a_request_that_ends_the_engine_is_told_so(tmp_path, token):
    with running(tmp_path) as server:
        assert server.ask("/v1/completions", {"prompt": [token]})[0] == 503
        until(lambda: server.ask("/health")[0] == 200)
        server.complete(max_tokens=2)


def test_a_worker_does_not_outlive_its_server(tmp_path):
    with running(tmp_path, code=-signal.SIGKILL) as server:
        worker = server.worker()
        server.process.kill()

        def is_gone():
            try:
                return Path(f"/proc/{worker}/stat").read_text().split()[2] == "Z"
            except OSError:
                return True

        until(is_gone)


def test_a_key_opens_the_server(tmp_path):
    with running(tmp_path, api_key="secret-a") as server:
        for headers in ({}, {"Authorization": "Bearer secret"}, {"Authorization": "secret-a"}):
            status, given, answer = server.ask("/v1/models", headers=headers)
            assert (status, given["WWW-Authenticate"]) == (401, "Bearer")
            assert "send it as Authorization: Bearer KEY" in answer["error"]["message"]
        assert server.ask("/metrics")[0] == server.ask("/status")[0] == 401
        assert server.ask("/v1/models", headers={"Authorization": "Bearer secret-a"})[0] == 200
        assert server.ask("/health")[0] == server.ask("/")[0] == 200
        assert server.ask("/v1/models", headers={"Authorization": b"Bearer \xe9\xff"})[0] == 401


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_reason(tmp_path):
    engine = {"vocab": VOCAB, "slots": 0}
    arguments = [str(write_tokenizer(tmp_path)), json.dumps(engine), json.dumps({"name": "tiny", "port": 0})]
    ended = subprocess.run(
        [sys.executable, "-c", START, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "ProcessError: slots is 0; give at least 1" in ended.stderr and ended.returncode == 1
