"""What most commands are asked: a function, its arguments, a cluster and a method, as options with their values."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.console import CommandError
from meshwright.cli.options import (
    PIPELINES,
    ArgsOption,
    ClusterOption,
    MemoryOption,
    MeshOption,
    MethodOption,
    MicrobatchesOption,
    ModelArgument,
    PipelineOption,
    RecipeOption,
    RecomputeOption,
)
from meshwright.zoo.options import ATTENTION, CHECKPOINTS

if TYPE_CHECKING:
    from meshwright.hardware import Cluster

_MESH = re.compile(r"\d{1,9}([x×]\d{1,9})*", re.IGNORECASE)
_AXIS = re.compile(r"(\w+)\s*=\s*(\d{1,9})")


@dataclass(frozen=True)
class Request:
    """The function that a command is about, and how it is to be planned.

    Attributes:
        model: A name of the zoo, or ``module:function``; of a saved plan, its file.
        args: ``module:name`` of the function's arguments; None for a zoo model.
        cluster: A cluster, or what `mw.cluster` takes.
        mesh: One mesh view; None for all.
        zoo: The options of a zoo model that were given.
        method: A name of `--method`.
        memory_fraction: Part of the memory that the plan may use; None for the method's own.
        microbatches: Parts of the batch, or auto.
        recompute: What the backward pass computes again, or auto.
        pipeline: Whether to look for pipelines, too; None for the method's own.
        recipe: A recipe of `--recipe`; None for none.
    """

    model: str
    args: str | None
    cluster: "str | Cluster"
    mesh: tuple[int, ...] | dict[str, int] | None
    zoo: Mapping[str, Any]
    method: str
    memory_fraction: float | None
    microbatches: int | str
    recompute: str
    pipeline: bool | None
    recipe: str | None


def takes_request(*names: str, **others: tuple[Any, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command options in place of its parameter `request`, which gets what they say.

    Args:
        *names: Parameters of `_requested`, in the order of the help; ``zoo`` stands for all options of a zoo model.
        **others: The type and the default of options that this command declares in its own way.
    """

    def declared(name: str) -> list[Parameter]:
        if name == "zoo":
            return list(signature(_zoo_options).parameters.values())
        parameter = signature(_requested).parameters[name]
        kind, default = others.get(name, (parameter.annotation, parameter.default))
        return [parameter.replace(annotation=kind, default=default)]

    def taking(command: Callable[..., None]) -> Callable[..., None]:
        options = {name: declared(name) for name in names}

        @wraps(command)
        def run(**given: Any) -> None:
            asked = {name: {one.name: given.pop(one.name) for one in some} for name, some in options.items()}
            zoo = _zoo_options(**asked.pop("zoo"))
            values = {name: value for some in asked.values() for name, value in some.items()}
            command(request=_requested(zoo=zoo, **values), **given)

        parameters: list[Parameter] = []
        for name, parameter in signature(command).parameters.items():
            parameters += [one for some in options.values() for one in some] if name == "request" else [parameter]
        named = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
        run.__signature__ = signature(command).replace(parameters=named)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in named}
        return run

    return taking


def _requested(
    *,
    zoo: Mapping[str, Any],
    model: ModelArgument,
    cluster: ClusterOption = "local",
    args: ArgsOption = None,
    mesh: MeshOption = None,
    method: MethodOption = "auto",
    microbatches: MicrobatchesOption = "auto",
    recompute: RecomputeOption = "auto",
    pipeline: PipelineOption = "auto",
    recipe: RecipeOption = None,
    memory_fraction: MemoryOption = None,
) -> Request:
    parts, stages = parse_microbatches(microbatches), parse_pipeline(pipeline)
    return Request(
        model, args, cluster, parse_mesh(mesh), zoo, method, memory_fraction, parts, recompute, stages, recipe
    )


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


def parse_pipeline(text: str) -> bool | None:
    """Reads ``auto``, ``yes`` or ``no``."""
    if text not in PIPELINES:
        raise CommandError(f"--pipeline is {text!r:.60}; give auto, yes or no")
    return PIPELINES[text]


def parse_microbatches(text: str) -> int | str:
    """Reads ``auto`` or a number."""
    if text == "auto":
        return text
    if not (text.isdecimal() and 0 < int(text) < 2**16):
        raise CommandError(f"--microbatches is {text!r:.60}; give a whole number, 1 or more, or auto")
    return int(text)


def parse_mesh(text: str | None) -> tuple[int, ...] | dict[str, int] | None:
    """Reads ``50x4`` or ``data=50,model=4``."""
    if text is None:
        return None
    if _MESH.fullmatch(text.strip()):
        return tuple(int(size) for size in re.split("[x×]", text.strip().lower()))
    axes = [_AXIS.fullmatch(part.strip()) for part in text.split(",")]
    size_of_axis = {axis[1]: int(axis[2]) for axis in axes if axis is not None}
    if len(size_of_axis) != len(axes):
        raise CommandError(
            f"--mesh is {text!r:.60}; write the sizes of its axes, such as 50x4 or 2x25x4, or their names and sizes, "
            "each once: data=50,model=4"
        )
    return size_of_axis
