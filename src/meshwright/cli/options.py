"""Options that several commands share."""

from typing import Annotated

import typer

from meshwright.zoo.options import CHECKPOINTS

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
MeshOption = Annotated[
    str | None, typer.Option(help="One mesh view, such as 50x4 or data=50,model=4, instead of all of them.")
]
MethodOption = Annotated[
    str, typer.Option(metavar="NAME", help=f"What is fixed before the rest is optimised: {', '.join(METHOD_NAMES)}.")
]
MemoryOption = Annotated[
    float | None, typer.Option(help="Part of each device's memory that the plan may use.  [default: 0.9]")
]
MicrobatchesOption = Annotated[
    str, typer.Option(metavar="auto|N", help="Parts of the batch, run one after the other; auto: as memory needs.")
]
RecomputeOption = Annotated[
    str,
    typer.Option(
        metavar="WORD",
        help="What the backward pass computes again: none, selective, alternate, full, full:1/2, 'as written', auto; "
        "by offload full, from inputs on the host.",
    ),
]
PipelineOption = Annotated[
    str,
    typer.Option(
        metavar="auto|yes|no",
        help="Look for pipelines, too: stages on submeshes; auto: only where nothing else fits. Alone it means yes.",
    ),
]
RecipeOption = Annotated[
    str | None,
    typer.Option(help="A fixed pipeline, such as 'data=4,tensor=8,pipeline=2,microbatch=1,checkpoint=full'."),
]


def json_option(what: str, those: str = "them") -> object:
    """The option of a file for a result as JSON."""
    return typer.Option("--json", help=f"Write {what} as JSON; '-' writes {those} to stdout and nothing else.")


JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
PIPELINES: dict[str, bool | None] = {"auto": None, "yes": True, "no": False}
_PIPELINE_ALONE = {("--pipeline", False): "--pipeline=yes"} | dict.fromkeys(
    (("--no-pipeline", False), ("--no-pipeline", True)), "--pipeline=no"
)


def _pairs(arguments: list[str]) -> list[tuple[str, str]]:
    """Each argument with the one that follows it; an empty one after the last."""
    return list(zip(arguments, [*arguments[1:], ""], strict=False))


def spelled_out(arguments: list[str]) -> list[str]:
    """Arguments of a command with the values that `--checkpoint` and `--pipeline` alone, or with `--no-`, stand for.

    A word after `--checkpoint` that is none of its values is the model, unless the model came first.
    """
    arguments = [_PIPELINE_ALONE.get((text, following in PIPELINES), text) for text, following in _pairs(arguments)]
    spelled, has_model = [], bool(arguments) and not arguments[0].startswith("-")
    for text, following in _pairs(arguments):
        is_value = following in CHECKPOINTS or (has_model and following and not following.startswith("-"))
        alone = text == "--checkpoint" and not is_value
        spelled.append("--checkpoint=full" if alone else "--checkpoint=none" if text == "--no-checkpoint" else text)
    return spelled
