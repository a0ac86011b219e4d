"""What `meshwright compare` does: several methods for one function, priced alike and, if asked for, run here."""

from typing import TYPE_CHECKING

from meshwright import cli_plan
from meshwright.cli_screen import CommandError, Stages

if TYPE_CHECKING:
    from meshwright.runtime.comparison import Comparison

NAMES = ("auto", "data", "zero1", "zero2", "zero3", "tensor")


def parse_methods(text: str) -> tuple[str, ...]:
    """Reads ``auto,data,zero3``."""
    names = tuple(name.strip().lower() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        wrong = f"names {unknown[0]!r}" if unknown else "is empty"
        raise CommandError(f"--methods {wrong}; write some of {', '.join(NAMES)}, with commas between them")
    return names


def find_comparison(request: cli_plan.Request, names: tuple[str, ...], steps: int, stages: Stages) -> "Comparison":
    """Compares the methods; runs them where steps are asked for."""
    if steps < 0:
        raise CommandError(f"--steps is {steps}; give how many steps to time, 0 to price the methods only")
    machine = cli_plan.machine_of(request)
    with stages:
        function, args = cli_plan.function_of(request, stages, real=steps > 0)
        from meshwright.runtime.compare import compare  # loads JAX

        return compare(
            function,
            *args,
            methods=[cli_plan.method_of(name, request.memory_fraction) for name in names],
            cluster=machine,
            mesh=request.mesh,
            steps=steps,
            run=steps > 0,
            on_progress=stages.say,
        )
