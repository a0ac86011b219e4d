"""The alternatives of every tensor that the page shows, as far as there is time to price them."""

import time
from collections.abc import Sequence
from typing import Any

from meshwright.explain.alternatives.explanation import Explanation
from meshwright.explain.alternatives.why import Explainer
from meshwright.explain.show.tensor_table import TensorRow
from meshwright.parallelism.subject.subject import Subjects

_CHANGES = 3
_ROUNDS = 2  # rounds of solving: a third one would have hardly more time per tensor than the second


def add_alternatives(
    subjects: Subjects, rows: Sequence[TensorRow], shown: list[dict[str, Any]], deadline: float
) -> None:
    """Bounds the alternatives, then solves for them, the largest tensors first, while there is time.

    Every tensor has its share of the time; the remaining time goes to the tensors whose share did not suffice.

    Args:
        subjects: The plan's program, or its stages.
        rows: Tensors, as tables show them.
        shown: The page's data of each; the alternatives are added to it.
        deadline: The end of the time, on the clock of `time.perf_counter`.
    """
    explainers: dict[int | None, Explainer] = {}
    tensors = {t.path: t for t in subjects.plan.arguments}
    wanted = [i for i, row in enumerate(rows) if row.role in ("parameters", "data") and row.shape]
    wanted.sort(key=lambda i: (rows[i].role != "parameters", -rows[i].bytes_on_device * len(rows[i].paths)))
    waiting = []
    for i in wanted:
        tensor = tensors[rows[i].paths[0]]
        subject = subjects.of(tensor)
        explainer = explainers.setdefault(subject.number, Explainer(subject))
        waiting.append((i, tensor, explainer))
        shown[i] |= _explanation(explainer.explain(tensor, None))
    for _ in range(_ROUNDS):
        unsolved = []
        for done, (i, tensor, explainer) in enumerate(waiting):
            left = deadline - time.perf_counter()
            if left <= 0:
                return
            explanation = explainer.explain(tensor, left / (len(waiting) - done))
            shown[i] |= _explanation(explanation)
            if explanation.num_left or any(a.cost == float("inf") > a.at_least for a in explanation.alternatives):
                unsolved.append((i, tensor, explainer))
        waiting = unsolved


def _explanation(found: Explanation) -> dict[str, Any]:
    alternatives = [
        {
            "symbols": a.symbols,
            "words": a.words,
            "difference": a.difference if a.at_least < float("inf") else None,
            "sure": "exact" if a.is_exact else "at least" if a.cost == float("inf") else "at most",
            "allowed": a.allowed,
            "fits": a.fits,
            "peak": a.peak_bytes,
            "changes": [[c.what, c.where, c.seconds] for c in a.changes[:_CHANGES]],
            **({} if a.effect is None else {"microbatch": a.effect.microbatch_s, "once": a.effect.once_s}),
        }
        for a in found.alternatives
    ]
    where = {} if found.stage is None else {"stage": found.stage, "counts": found.counts}
    return {"reason": found.reason, "alternatives": alternatives, "left": found.num_left, **where}
