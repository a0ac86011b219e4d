"""How far is a range of layers, split as a solve of the whole model says, from a solve of its own?

All are priced by layer, with what the range reads from layers before it. On every view the search starts from the
better of two solves of the whole model: for a single microbatch, and for many, of which what is done once a step is a
small part. What is lost then, the stages of the pipeline that is found get back: each is split for itself in the end.
"""

import sys
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.graph import trace
from meshwright.pipeline.layers.batch_sizes import ResizableBatch
from meshwright.pipeline.layers.forward_pass import Flow
from meshwright.pipeline.layers.layers import Wishes, find_layers
from meshwright.pipeline.prices.catalogue import submesh
from meshwright.pipeline.prices.layer_prices import ALL_SECONDS, Item, LayerPrices
from meshwright.pipeline.prices.layer_pricing import Pricing
from meshwright.pipeline.prices.stage_problem import FREE, STEADY, Own, price_way
from meshwright.planner.grouping.groups import Grouping
from meshwright.planner.grouping.roles import find_roles

MODELS = [
    # model, cluster, views, rows of a replica, options of the zoo
    ("llama2-13b", "8x8 h100", [(2,), (8,), (2, 4)], 2, {}),
    ("alpa-gpt-39b", "8x8 v100-16gb", [(8,), (2, 4)], 2, {"dtype": "float16"}),
    ("mixtral-8x7b", "2x8 h100", [(8,), (2, 4)], 4, {"layers": 8}),
    ("wide-resnet-1b", "2x4 a100-40gb", [(4,), (2, 2)], 32, {}),
]
MANY = 16  # microbatches
ONCE = [Item.GRADIENTS_SENT, Item.UPDATE, Item.UPDATE_SENT]
PARTS = 4  # a range is so large a part of the model


def seconds(prices: LayerPrices | None, layers: tuple[int, int], num_microbatches: int) -> float:
    """Seconds that a range takes for one of so many microbatches."""
    assert prices is not None
    part = prices.items[:, slice(*layers)].sum(axis=1)
    return float(part[ALL_SECONDS].sum() - (1 - 1 / num_microbatches) * part[ONCE].sum())


def rows_of(model: str, where: str, views: list[tuple[int, ...]], num_rows: int, options: dict) -> list[tuple]:
    """Rows of the table: for each view and range the time as planned and as solved by itself."""
    example = zoo.build(model, batch=num_rows, **options)
    traced = trace(example.train_step, example.state, example.batch)
    model_layers = find_layers(Flow(traced.graph, Grouping(traced.graph).nests, find_roles(traced.graph)), Wishes())
    pricing = Pricing(ResizableBatch(traced).at(num_rows), model_layers)
    size, end = max(model_layers.num_layers // PARTS, 1), model_layers.num_layers
    ranges = {"first": (0, size), "middle": (end // 2, end // 2 + size), "last": (end - size, end)}
    found = []
    for view in views:
        mesh = submesh(mw.cluster(where), prod(view)).mesh(view)
        whole = [price_way(pricing, mesh, way) for way in (FREE, STEADY)]
        for count in (1, MANY):
            gaps = []
            for layers in ranges.values():
                least = seconds(price_way(pricing, mesh, Own((layers,), count)), layers, count)
                free, steady = (seconds(prices, layers, count) / least - 1 for prices in whole)
                gaps += [f"{free:+.2%}", f"{min(free, steady):+.2%}"]
            found.append((model, where, "×".join(map(str, view)), count, *gaps))
            print(*found[-1], flush=True)
    return found


def main() -> None:
    rows = [row for job in MODELS for row in rows_of(*job)]
    columns = [f"{name} {what}" for name in ("first", "middle", "last") for what in ("", "of both")]
    header = ("model", "cluster", "view", "microbatches", *(name.strip() for name in columns))
    table("Ranges", __doc__ or "", header, rows)


if __name__ == "__main__":
    main()
