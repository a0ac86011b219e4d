"""The load on a served model: when requests arrive, and how long their prompts and answers are."""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from meshwright.errors import ServingError

if TYPE_CHECKING:
    import numpy as np

#: Lengths in tokens: one for all; a pair, between which all are equally often; or how often each one is.
Lengths = int | tuple[int, int] | Mapping[int, float]

#: What columns of trace files are called: ours first, then those of traces that Azure and Mooncake published.
ARRIVED = ("arrival_s", "TIMESTAMP", "timestamp")
TOKENS_IN = ("tokens_in", "ContextTokens", "input_length")
TOKENS_OUT = ("tokens_out", "GeneratedTokens", "output_length")


class Arrival(NamedTuple):
    """One request: when it comes, how many tokens its prompt has, and how many the answer will have."""

    at_s: float
    tokens_in: int
    tokens_out: int


@dataclass(frozen=True)
class Traffic:
    """A load: requests that arrive at random or as a trace says.

    Attributes:
        rate: Requests per second, in the mean; None with a trace, for the trace's own. Another one stretches the trace.
        tokens_in: Tokens of a prompt: a number, ``(least, most)``, or ``{length: how often}``.
        tokens_out: Tokens of an answer, likewise.
        burstiness: Coefficient of variation of the time between two arrivals, which is gamma distributed: 1 is a
            Poisson process, 0 is regular, and larger ones come in bursts.
        trace: A file with one request a line, as CSV with the columns ``arrival_s,tokens_in,tokens_out``, or as lines
            of JSON with these keys; the public traces of Azure and Mooncake are read as well.
        seed: Of the random draws.

    Examples:
        >>> import meshwright as mw
        >>> chat = mw.Traffic(rate=20, tokens_in={200: 3, 2000: 1}, tokens_out=(50, 400), burstiness=2)
        >>> chat.mean_in, chat.mean_out
        (650.0, 225.0)
        >>> first, *_ = chat.arrivals(100)
        >>> first.tokens_in in (200, 2000)
        True
    """

    rate: float | None = None
    tokens_in: Lengths = 1024
    tokens_out: Lengths = 256
    burstiness: float = 1.0
    trace: str | Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate is None and self.trace is None:
            raise ServingError("traffic needs rate=, such as rate=20 requests per second, or trace=, a file's path")
        if self.rate is not None and not _is_number(self.rate, above=0):
            raise ServingError(f"rate is {self.rate!r}; give requests per second above 0, such as 20")
        if not _is_number(self.burstiness, above=-1) or self.burstiness < 0:
            raise ServingError(f"burstiness is {self.burstiness!r}; give 1 for a Poisson process, more for bursts")
        for name in ("tokens_in", "tokens_out"):
            _check_lengths(name, getattr(self, name))
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise ServingError(f"seed is {self.seed!r}; give a whole number from 0")
        if not isinstance(self.trace, str | PathLike | None):
            raise ServingError(f"trace is {self.trace!r}; give a file's path")
        if self.trace is not None:
            object.__setattr__(self, "_recorded", tuple(_read_trace(Path(self.trace))))

    @property
    def recorded(self) -> tuple[Arrival, ...]:
        """The requests of the trace file as it has them; none without one."""
        requests: tuple[Arrival, ...] = getattr(self, "_recorded", ())
        return requests

    @property
    def mean_rate(self) -> float:
        """Requests per second."""
        if self.rate is not None:
            return self.rate
        return _rate(self.recorded)

    @property
    def mean_in(self) -> float:
        """Tokens of a prompt in the mean."""
        return _mean([a.tokens_in for a in self.recorded]) if self.recorded else _mean_length(self.tokens_in)

    @property
    def mean_out(self) -> float:
        """Tokens of an answer in the mean."""
        return _mean([a.tokens_out for a in self.recorded]) if self.recorded else _mean_length(self.tokens_out)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest answer."""
        if self.recorded:
            return max(a.tokens_in + a.tokens_out for a in self.recorded)
        return _most(self.tokens_in) + _most(self.tokens_out)

    def at(self, rate: float) -> "Traffic":
        """The same load at another rate."""
        return replace(self, rate=rate)

    def arrivals(self, number: int) -> list[Arrival]:
        """The first requests, in the order of their arrival; a trace that is shorter begins again."""
        if self.recorded:
            turns = range(-(-number // len(self.recorded)))
            stretch, turn_s = _rate(self.recorded) / self.mean_rate, len(self.recorded) / self.mean_rate
            again = [a._replace(at_s=a.at_s * stretch + turn * turn_s) for turn in turns for a in self.recorded]
            return again[:number]
        import numpy as np  # here, since importing the package loads none

        # Each quantity has a generator of its own, so that another rate has the same requests, closer together.
        gaps, into, out = (np.random.default_rng([self.seed, stream]) for stream in range(3))
        shape = self.burstiness**-2 if self.burstiness else math.inf
        waits = gaps.gamma(shape, 1 / shape, number) if math.isfinite(shape) else np.ones(number)
        at_s = np.cumsum(waits) / self.mean_rate
        lengths = (_draw(self.tokens_in, number, into), _draw(self.tokens_out, number, out))
        return [Arrival(float(t), int(i), int(o)) for t, i, o in zip(at_s, *lengths, strict=True)]

    def __str__(self) -> str:
        kind = f"trace {Path(self.trace).name}" if self.trace else "Poisson" if self.burstiness == 1 else "bursty"
        return f"{self.mean_rate:.4g} requests/s ({kind}), {self.mean_in:,.0f} tokens in, {self.mean_out:,.0f} out"


def _check_lengths(name: str, lengths: Lengths) -> None:
    legal = isinstance(lengths, int | tuple | Mapping) and not isinstance(lengths, bool)
    values = _values(lengths) if legal else []
    shares = list(lengths.values()) if isinstance(lengths, Mapping) else [1]
    whole = bool(values) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 1 for v in values)
    pair = not isinstance(lengths, tuple) or (len(lengths) == 2 and whole and lengths[0] <= lengths[1])
    if not (legal and whole and pair and all(_is_number(share, above=0) for share in shares)):
        raise ServingError(
            f"{name} is {lengths!r}; give a number of tokens such as 1024, a pair (least, most), or a table "
            "{length: how often}"
        )


def _values(lengths: Lengths) -> list[int]:
    return [lengths] if isinstance(lengths, int) else list(lengths)


def _most(lengths: Lengths) -> int:
    return max(_values(lengths))


def _mean_length(lengths: Lengths) -> float:
    if isinstance(lengths, Mapping):
        return sum(length * share for length, share in lengths.items()) / sum(lengths.values())
    return _mean(_values(lengths))


def _draw(lengths: Lengths, number: int, generator: "np.random.Generator") -> "np.ndarray":
    if isinstance(lengths, Mapping):
        total = sum(lengths.values())
        return generator.choice(list(lengths), number, p=[share / total for share in lengths.values()])
    least, most = lengths if isinstance(lengths, tuple) else (lengths, lengths)
    return generator.integers(least, most + 1, number)


def _rate(requests: tuple[Arrival, ...]) -> float:
    return (len(requests) - 1) / (requests[-1].at_s - requests[0].at_s)


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)


def _is_number(value: object, above: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value < math.inf


def _read_trace(path: Path) -> Iterable[Arrival]:
    """The requests of a file, which begin at 0 seconds."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # tables of office programs begin with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise ServingError(f"trace {str(path)!r} cannot be read: {error}") from None
    requests = sorted(_parsed(path, text), key=lambda request: request.at_s)
    if len(requests) < 2 or requests[0].at_s == requests[-1].at_s:
        raise ServingError(f"trace {str(path)!r} needs at least two requests at different times")
    return [request._replace(at_s=request.at_s - requests[0].at_s) for request in requests]


def _parsed(path: Path, text: str) -> Iterator[Arrival]:
    lines = text.splitlines()
    as_json = text.lstrip().startswith("{")
    rows: Iterable[str | dict[str, str]] = (
        [line for line in lines if line.strip()] if as_json else csv.DictReader(lines, skipinitialspace=True)
    )
    for number, row in enumerate(rows, 1):
        try:
            fields = json.loads(row) if isinstance(row, str) else row
            yield _request(fields)
        except (ValueError, TypeError, KeyError) as error:
            raise ServingError(
                f"trace {str(path)!r}, request {number}: {error}; each needs arrival_s, tokens_in and tokens_out, the "
                "two lengths whole numbers of at least 1"
            ) from None


def _request(fields: Mapping[str, str | float]) -> Arrival:
    given = [_field(fields, names) for names in (TOKENS_IN, TOKENS_OUT)]
    lengths = [int(length) for length in given]
    if min(lengths) < 1 or any(isinstance(length, float) and length % 1 for length in given):
        raise ValueError(f"lengths are {given[0]} and {given[1]}")
    at_s = _seconds(_field(fields, ARRIVED), "timestamp" in fields)
    if not math.isfinite(at_s):
        raise ValueError(f"it arrives at {at_s} s")
    return Arrival(at_s, *lengths)


def _field(fields: Mapping[str, str | float], names: tuple[str, ...]) -> str | float:
    for name in names:
        if name in fields:
            return fields[name]
    raise ValueError(f"it has no {names[0]}")


def _seconds(value: str | float, milliseconds: bool) -> float:
    """Seconds of a time: Mooncake's are milliseconds and Azure's are dates."""
    try:
        return float(value) / (1e3 if milliseconds else 1)
    except ValueError:
        return datetime.fromisoformat(str(value)[:26]).timestamp()
