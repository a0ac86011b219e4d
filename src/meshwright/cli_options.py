"""Options that several commands share."""

from enum import StrEnum
from typing import Annotated

import typer


class MethodName(StrEnum):
    """What `--method` takes."""

    AUTO = "auto"
    DATA = "data"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    TENSOR = "tensor"


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
ScanOption = Annotated[bool, typer.Option("--scan", help="Scan over a zoo model's layers instead of unrolling.")]
MemoryOption = Annotated[
    float | None, typer.Option(help="Part of each device's memory that the plan may use.  [default: 0.9]")
]
PipelineOption = Annotated[bool, typer.Option("--pipeline", help="Look for pipelines, too: stages on submeshes.")]
RecipeOption = Annotated[
    str | None,
    typer.Option(help="A pipeline laid down, such as 'data=4,tensor=8,pipeline=2,microbatch=1,checkpoint=full'."),
]
