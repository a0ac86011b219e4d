"""What is promised to the users of a served model, and the load under which it is to be kept."""

import math
from dataclasses import dataclass

from meshwright.errors import ServingError


@dataclass(frozen=True)
class Slo:
    """A promise on latency (a service-level objective).

    A request keeps it if its first token comes within `ttft_s`, and if its later tokens take at most `tpot_s` each in
    the mean. The promise is kept if at least `percentile` of all requests keep it.

    Attributes:
        ttft_s: Most seconds from a request's arrival to its first token, time in the queue included; None for any.
        tpot_s: Most seconds for each token after the first; None for any.
        percentile: Share of requests that must keep both.

    Examples:
        >>> import meshwright as mw
        >>> slo = mw.Slo(ttft_s=0.5, tpot_s=0.03)
        >>> slo.kept_by(ttft_s=0.4, tpot_s=0.02), slo.kept_by(ttft_s=0.4, tpot_s=0.04)
        (True, False)
        >>> print(slo)
        99% of requests: first token within 500 ms, later ones 30 ms each
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    percentile: float = 0.99

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if value is not None and not _is_positive(value):
                raise ServingError(f"{name} is {value!r}; give seconds above 0, such as 0.5, or None for no limit")
        if not _is_positive(self.percentile) or self.percentile >= 1:
            raise ServingError(f"percentile is {self.percentile!r}; give a share between 0 and 1, such as 0.99")

    def kept_by(self, ttft_s: float, tpot_s: float) -> bool:
        """Whether a request with these latencies keeps the promise."""
        return ttft_s <= _or_infinity(self.ttft_s) and tpot_s <= _or_infinity(self.tpot_s)

    def __str__(self) -> str:
        parts = []
        if self.ttft_s is not None:
            parts.append(f"first token within {self.ttft_s * 1e3:g} ms")
        if self.tpot_s is not None:
            parts.append(f"later ones {self.tpot_s * 1e3:g} ms each")
        return f"{self.percentile * 100:g}% of requests: {', '.join(parts) or 'any time'}"


def _or_infinity(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
