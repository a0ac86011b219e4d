"""The `meshwright compare` command: several methods for one function, priced alike and, on request, run here."""

from typing import TYPE_CHECKING

from meshwright.cli import plan
from meshwright.cli.console import CommandError, Stages
from meshwright.errors import ShardingError

if TYPE_CHECKING:
    from meshwright.hardware import Cluster
    from meshwright.planner import Method
    from meshwright.training.comparison import Comparison


def find_comparison(request: plan.Request, methods: str, steps: int, stages: Stages) -> "Comparison":
    """Compares the methods, and runs them if steps are requested."""
    if steps < 0:
        raise CommandError(f"--steps is {steps}; give how many steps to time, 0 to price the methods only")
    from meshwright.planner.method_names import find_methods

    try:
        chosen = find_methods(methods)
    except ShardingError as error:
        raise CommandError(f"--methods: {error}") from None
    chosen = tuple(plan.with_options(method, request) for method in chosen)
    machine = plan.machine_of(request)
    with stages:
        return _compared(request, chosen, machine, steps, stages)


def _compared(
    request: plan.Request, methods: "tuple[Method, ...]", machine: "Cluster", steps: int, stages: Stages
) -> "Comparison":
    function, args = plan.function_of(request, stages, real=steps > 0)
    from meshwright.training.compare import compare

    return compare(
        function,
        *args,
        methods=methods,
        cluster=machine,
        mesh=None if request.mesh is None else machine.mesh(request.mesh),
        steps=steps,
        run=steps > 0,
        on_progress=stages.say,
    )
