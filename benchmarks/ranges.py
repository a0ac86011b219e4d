"""How far is a range of layers, priced by sums over a solve of the whole model, from a solve of its own?"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.graph import trace
from meshwright.pipeline.flow import Flow
from meshwright.pipeline.layers import Wishes, find_layers
from meshwright.pipeline.prices import ALL_SECONDS, Pricing
from meshwright.pipeline.rows import Rows
from meshwright.planner.groups import Grouping
from meshwright.planner.methods import Auto
from meshwright.planner.roles import find_roles
from meshwright.units import format_seconds

DEPTH, ROWS = 16, 4


def by_layer(model: str, num_layers: int, devices: int) -> np.ndarray:
    """Seconds of each layer of a model of some depth; the head is the last."""
    example = zoo.build(model, batch=ROWS, layers=num_layers)
    traced = trace(example.train_step, example.state, example.batch)
    flow = Flow(traced.graph, Grouping(traced.graph).nests, find_roles(traced.graph))
    pricing = Pricing(Rows(traced).at(ROWS), find_layers(flow, Wishes()))
    prices = pricing.price(mw.cluster(f"1x{devices} h100").mesh((devices,)), Auto())
    return prices.items[ALL_SECONDS].sum(axis=0)


def main() -> None:
    rows = []
    for model in ("llama2-7b", "gpt3-6.7b"):
        for devices in (2, 8):
            whole = by_layer(model, DEPTH, devices)
            for number in (2, 4, 8):
                alone = by_layer(model, number, devices)
                summed = whole[:number].sum() + whole[DEPTH:].sum()  # the first layers, and the head
                gap = f"{100 * (summed / alone.sum() - 1):+.2f}%"
                rows.append((model, devices, number, format_seconds(summed), format_seconds(alone.sum()), gap))
    header = ("model", "devices", "layers", f"sums over {DEPTH} layers", "solved alone", "difference")
    table("Ranges", __doc__ or "", header, rows)


if __name__ == "__main__":
    main()
