"""The `meshwright plan` command: finds the function and its arguments, plans it, and tries checkpointing if needed.

`meshwright compare` finds its function the same way.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import meshwright
from meshwright.cli.console import CommandError, Stages
from meshwright.cli.request import Request
from meshwright.errors import ShardingError, raised_at

if TYPE_CHECKING:
    from meshwright.facade import Plan
    from meshwright.hardware import Cluster
    from meshwright.planner import Method

T = TypeVar("T")


def find_plan(request: Request, stages: Stages) -> "Plan":
    """Makes the requested plan, and shows every stage."""
    method = staged_method(request) or method_of(request)
    if request.pipeline is False and isinstance(method, meshwright.Auto):
        method = replace(method, pipeline=False)
    machine = machine_of(request)
    with stages:
        function, args = function_of(request, stages, real=False)
        return meshwright.plan(
            function, *args, cluster=machine, mesh=request.mesh, method=method, on_progress=stages.say
        )


def machine_of(request: Request) -> "Cluster":
    """The cluster; options that do not suit it are refused before any slow work."""
    machine = meshwright.cluster(request.cluster)
    if machine.mixed and not request.pipeline:
        raise CommandError(
            f"cluster {machine.name!r} has hosts of several kinds, which only stages of any size can use: name hosts "
            "of one kind, or use `meshwright plan` or `meshwright simulate` with --pipeline"
        )
    if request.mesh is not None:
        machine.mesh(request.mesh)
    return machine


def function_of(request: Request, stages: Stages, real: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its arguments; those of a zoo model are real arrays on request."""
    if ":" in request.model:
        return _own(request)
    return _zoo(request, stages, real)


def _zoo(request: Request, stages: Stages, real: bool = False) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if request.args is not None:
        raise CommandError(
            f"--args is for functions of your own; {request.model!r} is a model of the zoo, which brings its "
            "arguments: leave --args out, or write module:function"
        )
    stages.say(f"building {request.model}")
    from meshwright import zoo

    try:
        zoo.entry(request.model)
    except zoo.ZooError as error:
        raise CommandError(f"{error} For a function of your own write module:function with --args.") from None
    example = zoo.build(request.model, **request.zoo)
    return example.train_step, (example.init(0), example.sample(1)) if real else (example.state, example.batch)


def _own(request: Request) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if request.zoo:
        raise CommandError(
            f"--{next(iter(request.zoo))} is for models of the zoo; {request.model} takes its shapes from --args: set "
            "them there"
        )
    if request.args is None:
        raise CommandError(
            f"{request.model} needs --args module:name, naming a tuple of its arguments (arrays or "
            "jax.ShapeDtypeStruct) or a function that returns one"
        )
    function = load_name(request.model, "MODEL")
    if not callable(function):
        raise CommandError(f"MODEL {request.model} is {_kind(function)}, not a function; name one that can be called")
    args = load_name(request.args, "--args")
    if callable(args):
        args = _guard(args, f"--args {request.args} could not be called")
    if type(args) is not tuple:
        raise CommandError(
            f"--args {request.args} gives {_kind(args)}; give a tuple with one entry for each argument of the "
            "function, such as (state, batch)"
        )
    return function, args


def load_name(text: str, option: str) -> Any:
    """The object that ``module:name`` names; modules of the working directory are found, too."""
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise CommandError(f"{option} is {text!r}; write module:name, such as train:train_step")
    if module_name.endswith(".py") or "/" in module_name:
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise CommandError(f"{option} is {text!r}; write the module as Python imports it: {dotted}:{name}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        named = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise CommandError(
                f"{option}: there is no module {module_name!r}; run the command in the folder that holds it, or "
                "install it"
            ) from None
        raise CommandError(f"{option}: importing {module_name!r} failed: {_reason(error)}") from error
    except Exception as error:
        raise CommandError(f"{option}: importing {module_name!r} failed: {_reason(error)}") from error
    for part in name.split("."):
        if not hasattr(named, part):
            public = ", ".join(n for n in vars(named) if not n.startswith("_")) if hasattr(named, "__dict__") else ""
            raise CommandError(f"{option}: {module_name!r} has no {name!r}; it has {public or 'no public names'}")
        named = getattr(named, part)
    return named


def _guard(function: Callable[[], T], what: str) -> T:
    try:
        return function()
    except Exception as error:
        raise CommandError(f"{what}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """An exception of the user's code in a few words, with the line that raised it."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    where = raised_at(error)
    return f"{type(error).__name__}: {error}" + (f" ({where})" if where else "")


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def method_of(request: Request) -> "Method":
    """The method of a name of `--method`, with the options that all methods have."""
    from meshwright.planner.method_names import find_method

    try:
        return with_options(find_method(request.method), request)
    except ShardingError as error:
        raise CommandError(f"--method: {error}") from None


def with_options(method: "Method", request: Request) -> "Method":
    """A method with the options of a command that all methods have."""
    from meshwright.runtime.recomputation.policies import AS_WRITTEN, AUTO

    fraction = method.memory_fraction if request.memory_fraction is None else request.memory_fraction
    check_recompute(request.recompute)
    # A model of the zoo that was asked for with checkpoints keeps them, where nothing else is said.
    recompute = AS_WRITTEN if "checkpoint" in request.zoo and request.recompute == AUTO else request.recompute
    return replace(method, memory_fraction=fraction, microbatches=request.microbatches, recompute=recompute)


def check_recompute(word: str) -> None:
    """Refuses what is no policy."""
    from meshwright.runtime.recomputation.policies import check_word

    try:
        check_word(word)
    except ShardingError as error:
        raise CommandError(f"--{error}") from None


def staged_method(request: Request) -> "Method | None":
    """The method of `--pipeline` or `--recipe`; None where neither is given."""
    options: dict[str, Any] = {} if request.memory_fraction is None else {"memory_fraction": request.memory_fraction}
    if not request.pipeline and request.recipe is None:
        return None
    options_alone = (
        ("--mesh", None),
        ("--method", "auto"),
        ("--microbatches", "auto"),
        ("--recompute", "auto"),
    )
    for option, default in options_alone:
        if getattr(request, option[2:]) != default:
            raise CommandError(f"{option} is for plans without stages; leave it out, or --pipeline and --recipe")
    if request.recipe is None:
        return meshwright.Auto(pipeline=True, **options)
    if request.pipeline:
        raise CommandError("--recipe fixes the whole pipeline; leave out --pipeline")
    return meshwright.ThreeD(**_parse_recipe(request.recipe), **options)


def _parse_recipe(text: str) -> dict[str, Any]:
    """Reads ``data=12,tensor=8,pipeline=32,schedule=1f1b``."""
    numbers, words = ("data", "tensor", "pipeline", "microbatch", "interleave"), ("schedule", "checkpoint")
    sizes: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in (*numbers, *words):
            raise CommandError(f"--recipe: cannot read {part.strip()!r}; write some of {', '.join((*numbers, *words))}")
        if name in numbers and not (value.isdecimal() and len(value) < 10):
            raise CommandError(f"--recipe: {name} is {value!r:.60}; give a whole number")
        sizes[name] = int(value) if name in numbers else value
    return sizes


def check_writable(path: Path | None) -> None:
    """Refuses a file that cannot be written, before any slow work."""
    if path is None or str(path) == "-":
        return
    if path.is_dir():
        raise CommandError(f"cannot write {path}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise CommandError(f"cannot write {path}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise CommandError(f"cannot write {path}: permission denied; choose another place")
