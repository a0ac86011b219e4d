"""Options that several commands share."""

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Annotated, Any

import typer

from meshwright.cli.console import CommandError
from meshwright.zoo.options import ATTENTION, CHECKPOINTS

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


PIPELINES: dict[str, bool | None] = {"auto": None, "yes": True, "no": False}
_PIPELINE_ALONE = {("--pipeline", False): "--pipeline=yes"} | dict.fromkeys(
    (("--no-pipeline", False), ("--no-pipeline", True)), "--pipeline=no"
)
ZooOptions = Mapping[str, Any]
NO_OPTIONS: ZooOptions = MappingProxyType({})


def takes_zoo_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command all options of a zoo model in place of its parameter `zoo`, which gets those that were given."""
    of_command, shared = signature(command), signature(_zoo_options)

    @wraps(command)
    def run(**given: Any) -> None:
        options = {name: given.pop(name) for name in shared.parameters}
        command(zoo=_zoo_options(**options), **given)

    parameters: list[Parameter] = []
    for name, parameter in of_command.parameters.items():
        parameters += shared.parameters.values() if name == "zoo" else [parameter]
    named = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
    run.__signature__ = of_command.replace(parameters=named)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in named}
    return run


def _zoo_options(
    *,
    batch: Annotated[int | None, typer.Option(help="Global batch size of a zoo model.")] = None,
    seq: Annotated[int | None, typer.Option(help="Sequence length of a zoo model.")] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers of a zoo model.")] = None,
    scan: Annotated[bool, typer.Option("--scan", help="Scan over a zoo model's layers instead of unrolling.")] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="[none|selective|alternate|full]",
            help="What a zoo model is written to recompute, and does unless --recompute says otherwise; "
            "--checkpoint alone is full, --no-checkpoint none.",
        ),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="[fused|plain]",
            help="Attention of a zoo model; by default fused where the chip has a kernel for it.",
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="NAME=VALUE", help="Any other option of a zoo model, such as dtype=float32."),
    ] = None,
) -> dict[str, Any]:
    """The options of a zoo model that were given, as `zoo.build` takes them."""
    for name, value, legal in (("checkpoint", checkpoint, CHECKPOINTS), ("attention", attention, ATTENTION)):
        if value is not None and value.partition(":")[0] not in legal:
            raise CommandError(f"--{name} is {value!r:.60}; give one of {', '.join(legal)}")
    given = {"batch": batch, "seq": seq, "layers": layers, "scan": scan or None, "checkpoint": checkpoint}
    options: dict[str, Any] = given | {"attention": attention}
    options = {name: value for name, value in options.items() if value is not None}
    for text in option or []:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name.isidentifier():
            raise CommandError(f"--option is {text!r:.60}; write NAME=VALUE, such as dtype=float32")
        if name in (*given, "attention"):
            raise CommandError(f"--option is {text!r:.60}, which has an option of its own: write --{name}")
        options[name] = _value(value)
    return options


def _value(text: str) -> bool | int | float | str:
    """A number or a truth value where the text is one; else the text."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


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
