"""Remarks that a program carries to its plan, as names of values (`jax.ad_checkpoint.checkpoint_name`)."""

from meshwright.graph.graph import Graph

#: What such a name begins with; the remark is the rest.
REMARK = "meshwright.remark: "


def carried_remarks(graph: Graph) -> list[str]:
    """The remarks, each once."""
    names = (s.params["name"] for s in graph.columns.signatures if s.primitive == "name")
    return sorted({name.removeprefix(REMARK) for name in names if name.startswith(REMARK)})
