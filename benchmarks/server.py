"""How many connections and how many tokens a second does the server carry, whatever the model?

    python benchmarks/server.py                    # with an engine that has no model: less than two minutes
    python benchmarks/server.py --connections 4000 --streams 1 64 256

The engine is the one of the tests: the real scheduler and a token for every sequence each step, without a model, so the
figures are what HTTP, JSON, text and the two processes cost, also as processor time of the server's process, which does
not depend on what else the machine does. First as many connections as asked for are opened at once,
each with one request: every one must be answered, or told to come again later (429). Then streams of tokens are read.
"""

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from report import table

from tests.serving.server.running import running

SLOTS = 256


def request(body):
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def answered(port, body):
    """One connection with one request: the status, the answer, and the seconds it took from the start."""
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(body))
    status = int((await reader.readline()).split()[1])
    answer = await reader.read()
    writer.close()
    return status, answer, time.perf_counter() - started


async def connections(port, count):
    """All at once."""
    body = {"prompt": "a", "max_tokens": 16, "ignore_eos": True}
    answers = await asyncio.gather(*(answered(port, body) for _ in range(count)), return_exceptions=True)
    failed = [answer for answer in answers if isinstance(answer, BaseException)]
    statuses = Counter(answer[0] for answer in answers if not isinstance(answer, BaseException))
    slowest = max(answer[2] for answer in answers if not isinstance(answer, BaseException))
    return {"connections": count, "statuses": dict(statuses), "failed": len(failed), "slowest_s": round(slowest, 2)}


def processor_s(process):
    """The processor time that a process has taken."""
    user, system = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


async def streams(server, count, tokens):
    """So many streams beside each other: tokens a second of all together, counted by the events that came."""
    body = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    started, processor = time.perf_counter(), processor_s(server.process.pid)
    answers = await asyncio.gather(*(answered(server.port, body) for _ in range(count)))
    processor = processor_s(server.process.pid) - processor
    seconds = time.perf_counter() - started
    assert all(status == 200 and b"[DONE]" in answer for status, answer, _ in answers)
    events = sum(answer.count(b"data: {") for _, answer, _ in answers)
    return {
        "streams": count,
        "tokens": tokens,
        "tokens_per_s": round(count * tokens / seconds),
        "events_per_token": round(events / count / tokens, 2),
        "server_us_per_token": round(processor / count / tokens * 1e6, 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step", type=float, default=0.005, help="seconds of a step of the engine")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    engine = {"slots": SLOTS, "queue": 512, "blocks": 64 * SLOTS, "token_budget": 2 * SLOTS, "step_s": options.step}
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), engine=engine) as server:
        found = asyncio.run(connections(server.port, options.connections))
        rows = [[f"{found.pop('connections'):,} connections with a request each", _words(found)]]
        for count in options.streams:
            found = asyncio.run(streams(server, count, options.tokens))
            rows.append([f"{found.pop('streams')} streams of {found.pop('tokens')} tokens", _words(found)])
    load = f"load average {os.getloadavg()[0]:.1f} at the end"
    question = (
        f"How many connections and how many tokens a second does the server carry? An engine without a model, {SLOTS} "
        f"slots, a queue of 512, steps of {options.step * 1e3:g} ms; server, worker and client "
        f"share the machine ({load})."
    )
    table("Server", question, ("at once", "what came"), rows)


def _words(found):
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found.items())


if __name__ == "__main__":
    main()
