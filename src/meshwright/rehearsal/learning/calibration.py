"""Efficiencies of classes of operations, learned from what was measured on a chip.

Every part that was rehearsed says how long work of several classes took together, and the model says how long it should
have taken each class. The factors of the classes fit the measured parts best (`fitting.py`), and are expected to be 1,
so that a class which few measurements speak of keeps about the model's time. They correct the model on that chip.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping

import numpy as np

from meshwright.cost.rates import cluster_rates
from meshwright.graph import Graph
from meshwright.hardware import Chip
from meshwright.planner.pricing.corrections import CollectiveFactors, Corrections
from meshwright.plans.plan import PlanData
from meshwright.profiler.database import cache_folder
from meshwright.profiler.local import SETTING
from meshwright.profiler.measurements import Database, Key, Measurement, measured_now, open_database, this_compiler
from meshwright.profiler.measurements.database import FILE_NAME
from meshwright.rehearsal.learning.fitting import fit
from meshwright.rehearsal.learning.from_parts import NO_FACTORS, Measured
from meshwright.rules import loop_nest
from meshwright.rules.base import Signature
from meshwright.rules.families.gathering import SCATTERS

CLASSES = ("product", "small product", "convolution", "attention", "look-up", "elementwise")
WORK = "work "  # begins the fingerprint of a row that says how much work of each class was done
LEAST, MOST = 0.2, 5.0  # beyond these a factor tells of a fault, not of an efficiency
_SMALL = 10  # a product of fewer than so many times the FLOPs that reach half of the best rate is small

_MODEL = 4  # the version of the model of compute; a change of its formulas raises it
_FIGURES = (
    "flops",
    "memory_bandwidth",
    "memory_efficiency",
    "launch_s",
    "fetch_s",
    "special_s",
    "best_fraction",
    "half_flops",
)
_LOOK_UPS = frozenset(("gather", "dynamic_slice", "dynamic_update_slice", "sort", "top_k", *SCATTERS))


def class_of(op: Signature, flops: float, chip: Chip) -> str:
    """The class of an operation that does so many FLOPs on one device."""
    if op.primitive == "conv_general_dilated":
        return "convolution"
    if op.primitive.startswith("dot_product_attention"):
        return "attention"
    if flops:
        return "small product" if flops < _SMALL * chip.half_flops else "product"
    return "look-up" if op.primitive.replace("_", "-") in _LOOK_UPS or op.primitive in _LOOK_UPS else "elementwise"


def keep_work(
    database: Database, rows: Iterable[Measured], graph: Graph, factors: CollectiveFactors = NO_FACTORS
) -> None:
    """Keeps the work of measured parts by class, beside the compute time that it took.

    Args:
        database: Where it is kept.
        rows: The parts.
        graph: Their program.
        factors: Of collectives, as in `Corrections`.
    """
    database.keep([found for row in rows if (found := _work(row, graph, factors)) is not None])


def _work(row: Measured, graph: Graph, factors: CollectiveFactors) -> Measurement | None:
    chip, compute_s = row.plan.mesh.chip, row.compute_s(factors)
    if chip is None or row.found is None or compute_s is None or row.found.key.chip != chip.name:
        return None
    modelled = modelled_by_class(row.plan, graph, row.part.operations, chip)
    text = json.dumps({"figures": figures_digest(chip), "modelled_s": modelled}, sort_keys=True)
    key = row.found.key
    key = Key(f"{WORK}{key.fingerprint}", text, key.chip, key.link, key.dtype, key.compiler)
    return measured_now(key, row.found.kind, compute_s)


def modelled_by_class(plan: PlanData, graph: Graph, operations: Iterable[int], chip: Chip) -> dict[str, float]:
    """Modelled compute of one run of some operations on a device that works alone, by class."""
    assert plan.mesh.cluster is not None
    plans, found = {op.serial: op for op in plan.ops}, dict[str, float]()
    rates = cluster_rates(plan.mesh.cluster, 1)
    for index in operations:
        op = graph.ops[index]
        load = plans[op.serial].load if op.serial in plans else None
        if load is not None:
            name = class_of(op.signature, load.flops, chip)
            found[name] = found.get(name, 0.0) + rates.load_s(load)
    return found


def figures_digest(chip: Chip) -> str:
    """A digest of the model of compute and its figures: what was modelled with others is stale."""
    told = [_MODEL, *(getattr(chip, name) for name in _FIGURES)]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def efficiencies(database: Database, chip: Chip) -> dict[str, float]:
    """Measured ÷ modelled time of each class of operations on a chip; empty where nothing was measured."""
    rows = []
    for found in database.rows(chip=chip.name, compiler=this_compiler()):
        if found.key.fingerprint.startswith(WORK) and found.seconds:
            modelled = _told_work(found.key.shardings, chip)
            if modelled is not None:
                rows.append([seconds / found.seconds for seconds in modelled])
    return fitted(np.array(rows)) if rows else {}


def _told_work(text: str, chip: Chip) -> list[float] | None:
    """Modelled seconds of each class in a row of work; None where they are stale, or of a foreign file and no work."""
    try:
        told = json.loads(text)
        if told["figures"] != figures_digest(chip):
            return None
        found = [float(told["modelled_s"].get(name, 0.0)) for name in CLASSES]
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return found if all(0 <= seconds < float("inf") for seconds in found) else None


def fitted(shares: np.ndarray) -> dict[str, float]:
    """The factors of the classes, given for each measurement the modelled ÷ the measured time of each class."""
    weight = np.sqrt((shares**2).mean(axis=0))
    factors = np.minimum(fit(shares, np.diag(weight), weight, LEAST), MOST)
    spoken = shares.sum(axis=0) > 0
    return {name: float(f) for name, f, on in zip(CLASSES, factors, spoken, strict=True) if on}


def calibrated(graph: Graph, chip: Chip, num_devices: int, factors: Mapping[str, float]) -> Corrections:
    """Corrections of every operation by its class; products are classed as if split over all devices."""
    columns, by_signature = graph.columns, dict[int, float]()
    for number in columns.examples:
        signature = columns.signatures[number]
        name = class_of(signature, loop_nest(signature).flops / num_devices, chip)
        by_signature[number] = factors.get(name, 1.0)
    about = "measured ÷ modelled: " + ", ".join(f"{name} {factor:.2f}" for name, factor in factors.items())
    usual = {index: by_signature[number] for index, number in enumerate(columns.signature.tolist())}
    return Corrections(usual, about=about)


def known_efficiencies(chip: Chip | None) -> dict[str, float]:
    """What the user's own database knows of a chip; nothing where ``MESHWRIGHT_MEASURE=never``."""
    never = os.environ.get(SETTING, "").strip().lower() == "never"
    if chip is None or never or not (cache_folder() / FILE_NAME).exists():
        return {}
    with open_database() as database:
        return efficiencies(database, chip)
