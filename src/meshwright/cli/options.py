"""Options that several commands share."""

from typing import Annotated

import typer

METHOD_NAMES = (
    "auto",
    "data",
    "zero1",
    "zero2",
    "zero3",
    "tensor",
)  # those of `planner.methods`, which is slow to load

ModelArgument = Annotated[str, typer.Argument(help="A model of the zoo (see `meshwright models`), or module:function.")]
ClusterOption = Annotated[
    str, typer.Option(help="'HOSTSxDEVICES CHIP' such as '50x4 a100-40gb', a .toml file, or 'local'.")
]
ArgsOption = Annotated[
    str | None,
    typer.Option(help="For module:function: module:name of a tuple of its arguments, or of a function giving it."),
]
MeshOption = Annotated[str | None, typer.Option(help="One mesh view, such as 50x4, instead of all of them.")]
BatchOption = Annotated[int | None, typer.Option(help="Global batch size of a zoo model.")]
SeqOption = Annotated[int | None, typer.Option(help="Sequence length of a zoo model.")]
LayersOption = Annotated[int | None, typer.Option(help="Number of layers of a zoo model.")]
MethodOption = Annotated[
    str, typer.Option(metavar="NAME", help=f"What is fixed before the rest is optimised: {', '.join(METHOD_NAMES)}.")
]
ScanOption = Annotated[bool, typer.Option("--scan", help="Scan over a zoo model's layers instead of unrolling.")]
MemoryOption = Annotated[
    float | None, typer.Option(help="Part of each device's memory that the plan may use.  [default: 0.9]")
]
PipelineOption = Annotated[bool, typer.Option("--pipeline", help="Look for pipelines, too: stages on submeshes.")]
RecipeOption = Annotated[
    str | None,
    typer.Option(help="A fixed pipeline, such as 'data=4,tensor=8,pipeline=2,microbatch=1,checkpoint=full'."),
]
