"""Figures of the server for Prometheus, and those of the last minutes for the status page."""

from collections import deque
from collections.abc import Iterable, Iterator
from time import monotonic

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from meshwright.serving.requests import Stats
from meshwright.serving.server.process import Worker

#: Borders of the histograms, from a small model's step to a request that waited long.
_FIRST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 1.0)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
#: What the status page shows: a point for each second of two minutes, and percentiles over so many requests.
SECONDS, _REQUESTS = 120, 512


class Metrics:
    """What is counted. Everything happens on the event loop."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self._registry = CollectorRegistry()
        self._registry.register(_EngineFigures(worker))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"meshwright_{name}", text, buckets=buckets, registry=self._registry)

        self._first = histogram("time_to_first_token_seconds", "From the request to its first token.", _FIRST_S)
        self._each = histogram("time_per_output_token_seconds", "Between tokens, mean of a request.", _TOKEN_S)
        self._whole = histogram("request_seconds", "From the request to its last token.", _REQUEST_S)
        self._requests = Counter(
            "meshwright_requests", "Texts by how they ended.", ["finish_reason"], registry=self._registry
        )
        self._refused = Counter(
            "meshwright_refused_requests", "Requests refused, by status.", ["status"], registry=self._registry
        )
        self._recent: dict[str, deque[float]] = {
            "first_token_s": deque(maxlen=_REQUESTS),
            "per_token_s": deque(maxlen=_REQUESTS),
        }
        self._points: deque[dict[str, float]] = deque(maxlen=SECONDS)
        self._last: tuple[float, Stats] | None = None

    def first_token(self, seconds: float) -> None:
        """A request got its first token."""
        self._first.observe(seconds)
        self._recent["first_token_s"].append(seconds)

    def finished(self, reason: str, num_tokens: int, whole_s: float, after_first_s: float) -> None:
        """A text has ended."""
        self._requests.labels(reason).inc()
        self._whole.observe(whole_s)
        if num_tokens > 1:
            self._each.observe(after_first_s / (num_tokens - 1))
            self._recent["per_token_s"].append(after_first_s / (num_tokens - 1))

    def ended_early(self, reason: str) -> None:
        """A text whose client has left, or whose worker died."""
        self._requests.labels(reason).inc()

    def refused(self, status: int) -> None:
        """A request was refused."""
        self._refused.labels(str(status)).inc()

    def exposition(self) -> bytes:
        """All figures in Prometheus' format."""
        return generate_latest(self._registry)

    def tick(self) -> None:
        """Adds a point to what the status page shows; called once a second."""
        now, stats = monotonic(), self._worker.stats
        if stats is None:
            self._last = None
            self._points.append({"tokens_out": 0.0, "tokens_in": 0.0, "running": 0, "waiting": 0, "cache": 0.0})
            return
        before_s, before = self._last or (now - 1.0, stats)
        elapsed = max(now - before_s, 1e-3)
        self._points.append(
            {
                "tokens_out": (stats.tokens_out - before.tokens_out) / elapsed,
                "tokens_in": (stats.tokens_in - before.tokens_in) / elapsed,
                "running": stats.running,
                "waiting": stats.waiting,
                "cache": stats.blocks_used / max(stats.blocks, 1),
            }
        )
        self._last = (now, stats)

    def recent(self) -> dict[str, object]:
        """What the status page shows of time."""
        return {
            "points": list(self._points),
            **{name: [percentile(values, part) for part in (0.5, 0.99)] for name, values in self._recent.items()},
        }


def percentile(values: Iterable[float], part: float) -> float | None:
    """The value below which a part of all values are; None of nothing.

    >>> percentile([3.0, 1.0, 2.0], 0.5)
    2.0
    """
    in_order = sorted(values)
    return in_order[min(int(part * len(in_order)), len(in_order) - 1)] if in_order else None


class _EngineFigures:
    """What the worker says of its engine, read when Prometheus asks."""

    def __init__(self, worker: Worker):
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        worker, stats = self._worker, self._worker.stats

        def gauge(name: str, text: str, value: float) -> Metric:
            return GaugeMetricFamily(f"meshwright_{name}", text, value)

        yield gauge("ready", "1 while a model is loaded.", int(worker.ready is not None))
        yield CounterMetricFamily("meshwright_worker_restarts", "Workers that died.", worker.restarts)
        if stats is None:
            return
        yield gauge("requests_running", "Requests in the batch.", stats.running)
        yield gauge("requests_waiting", "Requests in the queue.", stats.waiting)
        yield gauge("batch_slots", "The most requests in the batch.", stats.slots)
        yield gauge("cache_blocks", "Blocks of the cache.", stats.blocks)
        yield gauge("cache_blocks_used", "Blocks of the cache in use.", stats.blocks_used)
        yield gauge("step_seconds", "Time of a step, averaged over the last ones.", stats.step_s)
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts.", stats.tokens_in),
            ("prompt_tokens_cached", "Tokens of prompts that were in the cache.", stats.prefix_hits),
            ("generation_tokens", "Tokens generated.", stats.tokens_out),
            ("preemptions", "Requests whose blocks were taken away for a while.", stats.preemptions),
            ("steps", "Steps of the engine.", stats.steps),
        ):
            yield CounterMetricFamily(f"meshwright_{name}", text, value)  # of this worker: a new one begins at 0
