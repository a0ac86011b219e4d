"""Methods: which choices are fixed before the others are optimised, from none (`Auto`) to all (`Manual`).

Every method's plan is priced by the same model, so plans can be compared; and since every method is `Auto`'s own
problem with some choices fixed, `Auto` is never worse than any of them on the same mesh.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import ShardingError
from meshwright.graph import Graph
from meshwright.hardware import Cluster, Mesh
from meshwright.planner.given_shardings import matched, sharding_code, spec_dims
from meshwright.planner.grouping.roles import Roles, find_roles
from meshwright.planner.mesh_views import auto_meshes, worth_refining
from meshwright.planner.pricing.formulation import Restrictions
from meshwright.planner.splitting import divided_view, finer_view, most_split, most_split_along, split_batch, split_over
from meshwright.runtime.recomputation.policies import AS_WRITTEN, check_word
from meshwright.strategy.sharding import Axes

AUTO = "auto"  # what is left to the search


@dataclass(frozen=True)
class Method:
    """Fixes some choices; the solver makes the others.

    Args:
        memory_fraction: The part of a device's memory that the plan may use on a cluster; the rest is left to the
            runtime's own buffers. An abstract mesh's memory is used whole.
        seconds: The time that all of planning may take, tracing included. None lets it take the time it needs, and
            limits only the search for plans that fit the memory. The best plan found by then is returned, with its gap.
        microbatches: Into how many parts a train step cuts its batch; they run one after the other, and their gradients
            are added up. ``"auto"`` takes as many as the memory needs. A method of stages decides it by itself.
        recompute: What the backward pass computes again instead of keeping it: ``"none"``; ``"selective"``, all but
            products with weights and fused kernels; ``"alternate"``, every second product as well; ``"full"``, whole
            layers; ``"offload"``, the same, with their inputs kept in the host's memory; ``"full:1/2"`` and so on for a
            part of the layers; ``"as written"``, what `jax.checkpoint` says.
            ``"auto"`` decides it with the microbatches, and takes `jax.checkpoint` for a suggestion.
    """

    memory_fraction: float = field(default=0.9, kw_only=True)
    seconds: float | None = field(default=None, kw_only=True)
    microbatches: int | str = field(default=AUTO, kw_only=True)
    recompute: str = field(default=AUTO, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.memory_fraction, int | float) or not 0 < self.memory_fraction <= 1:
            raise ShardingError(f"memory_fraction is {self.memory_fraction!r}; give a fraction above 0 and at most 1")
        if self.seconds is not None and not (isinstance(self.seconds, int | float) and self.seconds > 0):
            raise ShardingError(f"seconds is {self.seconds!r}; give a number above 0, or None for no limit")
        count = self.microbatches
        if count != AUTO and (type(count) is not int or count < 1):
            raise ShardingError(f"microbatches is {count!r}; give a whole number, 1 or more, or {AUTO!r}")
        check_word(self.recompute)
        if self.staged and self.recompute not in (AUTO, AS_WRITTEN):
            raise ShardingError(
                f"recompute is {self.recompute!r}, but {self.name} chooses what each stage recomputes; leave it out"
            )
        if self.staged and count not in (AUTO, 1):
            raise ShardingError(
                f"microbatches is {count}, but {self.name} chooses the microbatches of a pipeline itself; leave it out"
            )

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def staged(self) -> bool:
        """Whether the model may be cut into stages, each on its own devices."""
        return False

    @property
    def spreads_batch(self) -> bool:
        """Whether it splits the batch over all devices."""
        return False

    def meshes(self, cluster: Cluster) -> list[Mesh]:
        """The mesh views to try on a cluster."""
        return [cluster.mesh((cluster.num_devices,))]

    def divided(self, graph: Graph, meshes: list[Mesh]) -> list[Mesh]:
        """The views to try for a function, some of whose tensors the number of devices may not divide."""
        return meshes

    def refined(self, fine: Sequence[Mesh], floors: Mapping[tuple[int, ...], float]) -> Sequence[Mesh]:
        """Of views of three axes those to try, given what views of fewer axes cost without a memory limit."""
        return fine

    def pins(self, graph: Graph, roles: Roles) -> dict[int, Hashable]:
        """Marks on values that have their own restrictions, so that folding does not tie them to others."""
        return {}

    def restrict(self, graph: Graph, roles: Roles, mesh: Mesh, axes: Axes) -> Restrictions:
        """The restrictions on one mesh."""
        return Restrictions()


@dataclass(frozen=True)
class Auto(Method):
    """Finds the fastest plan that fits.

    Args:
        fix: Shardings that are fixed: globs of paths to ``PartitionSpec``s. Paths of results start with ``out``.
            If several globs match a path, the last one applies.
        mesh_shapes: The mesh shapes to try, e.g. ``[(50, 4)]``; None tries all that are worth it.
        pipeline: Whether to search for pipelines: see ``docs/guides/pipelines.md``. By ``"auto"`` recipes of equal
            stages are compared with the plan of one program where they may be quicker by more than 1%, and all stages
            are looked for where no plan of one program fits; True always looks for all, which may take minutes.
        layers: How many layers to cut a pipelined model into, or their shares of the compute; None searches for them.
        boundaries: Globs of name scopes, e.g. ``("block*",)``: in a pipelined model a layer begins where one is
            entered. `mw.boundary` marks other places.
        profile: Whether to plan by measurement: parts of the program run on the devices here, and correct the model.
        profile_seconds: The time that measuring may take.
        memory_fraction, seconds: As in every `Method`.

    Examples:
        >>> import jax, jax.numpy as jnp, meshwright as mw
        >>> method = mw.Auto(fix={"w": jax.P(None, "x")}, mesh_shapes=[(4,)])
        >>> plan = mw.plan(lambda x, w: x @ w, jnp.ones((8, 4)), jnp.ones((4, 4)), cluster="1x4 h100", method=method)
        >>> [tuple(spec) for spec in plan.in_shardings]
        [(), (None, 'x')]
    """

    fix: Mapping[str, Any] = field(default_factory=dict)
    mesh_shapes: Sequence[Sequence[int]] | None = None
    pipeline: bool | str = field(default=AUTO, kw_only=True)
    layers: int | Sequence[float] | None = field(default=None, kw_only=True)
    boundaries: tuple[str, ...] = field(default=(), kw_only=True)
    profile: bool = field(default=False, kw_only=True)
    profile_seconds: float = field(default=300.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.profile_seconds, int | float) or not self.profile_seconds > 0:
            raise ShardingError(f"profile_seconds is {self.profile_seconds!r}; give a number above 0")
        if self.pipeline not in (AUTO, True, False):
            raise ShardingError(f"pipeline is {self.pipeline!r}; give True, False or {AUTO!r}")
        if self.profile and self.staged:
            raise ShardingError("profile=True measures plans of one program; leave it out, or pipeline=True")
        if not isinstance(self.fix, Mapping) or not all(isinstance(glob, str) for glob in self.fix):
            raise ShardingError(
                f"fix is {self.fix!r:.60}; give globs of paths to shardings: {{'state/params/*': P('x')}}"
            )
        if self.mesh_shapes is not None and not (isinstance(self.mesh_shapes, Sequence) and self.mesh_shapes):
            raise ShardingError(f"mesh_shapes is {self.mesh_shapes!r}; give a list of shapes such as [(4, 8)], or None")
        if not self.staged and (self.layers is not None or self.boundaries):
            raise ShardingError("layers and boundaries are for pipelined models; add pipeline=True, or leave them out")
        if self.staged and (self.fix or self.mesh_shapes is not None or type(self) is not Auto):
            raise ShardingError(
                "fix and mesh_shapes describe one mesh, and a pipeline has several; leave pipeline=True out"
            )

    @property
    def staged(self) -> bool:
        return self.pipeline is True

    @property
    def may_be_staged(self) -> bool:
        """Whether stages may be looked for: nothing is asked for that is about one program."""
        plain = Auto(memory_fraction=self.memory_fraction, seconds=self.seconds, recompute=self.recompute)
        return self == plain and self.recompute in (AUTO, AS_WRITTEN)

    def meshes(self, cluster: Cluster) -> list[Mesh]:
        if self.mesh_shapes is not None:
            return [cluster.mesh(shape) for shape in self.mesh_shapes]
        return auto_meshes(cluster)

    def divided(self, graph: Graph, meshes: list[Mesh]) -> list[Mesh]:
        if self.mesh_shapes is not None or type(self) is not Auto:
            return meshes
        return [*meshes, *finer_view(graph, meshes)]

    def refined(self, fine: Sequence[Mesh], floors: Mapping[tuple[int, ...], float]) -> Sequence[Mesh]:
        return fine if self.mesh_shapes is not None else worth_refining(fine, floors)

    def pins(self, graph: Graph, roles: Roles) -> dict[int, Hashable]:
        inputs, outputs = matched(self.fix, graph)
        marks: dict[int, Hashable] = {graph.outputs[o]: ("out", spec_dims(spec)) for o, spec in outputs.items()}
        return marks | {graph.inputs[i]: spec_dims(spec) for i, spec in inputs.items()}

    def restrict(self, graph: Graph, roles: Roles, mesh: Mesh, axes: Axes) -> Restrictions:
        inputs, outputs = matched(self.fix, graph)
        allowed = {
            graph.inputs[i]: frozenset(
                {sharding_code(spec, graph.input_paths[i], graph.types[graph.inputs[i]].shape, mesh, axes)}
            )
            for i, spec in inputs.items()
        }
        results = {
            o: sharding_code(spec, graph.output_paths[o], graph.types[graph.outputs[o]].shape, mesh, axes)
            for o, spec in outputs.items()
        }
        for output, argument in graph.state.items():  # a result that is an argument's next value is that argument
            if output in results and graph.inputs[argument] not in allowed:
                allowed[graph.inputs[argument]] = frozenset({results[output]})
        return Restrictions(allowed, results)


@dataclass(frozen=True)
class Manual(Auto):
    """Fixes shardings by path and replicates every argument that no glob matches.

    Args:
        fix: Globs of paths to ``PartitionSpec``s, as in `Auto`.
        mesh_shapes: The mesh shapes to try; None takes one that has the axes named in `fix`.
        memory_fraction, seconds: As in every `Method`.

    Examples:
        >>> import jax, jax.numpy as jnp, meshwright as mw
        >>> args, method = (jnp.ones((8, 4)), jnp.ones((4, 4))), mw.Manual({"x": jax.P("x")})
        >>> plan = mw.plan(lambda x, w: x @ w, *args, cluster="1x4 h100", method=method)
        >>> [tuple(spec) for spec in plan.in_shardings]
        [('x',), ()]
    """

    def meshes(self, cluster: Cluster) -> list[Mesh]:
        if self.mesh_shapes is not None:
            return [cluster.mesh(shape) for shape in self.mesh_shapes]
        axes = {a for spec in self.fix.values() for dim in spec_dims(spec) for a in dim}
        if cluster.num_hosts > 1 and cluster.devices_per_host > 1 and axes - {"x"}:
            return [cluster.mesh((cluster.num_hosts, cluster.devices_per_host))]
        return [cluster.mesh((cluster.num_devices,))]

    def restrict(self, graph: Graph, roles: Roles, mesh: Mesh, axes: Axes) -> Restrictions:
        found = super().restrict(graph, roles, mesh, axes)
        allowed = {value: frozenset({0}) for value in graph.inputs} | dict(found.allowed)
        return Restrictions(allowed, found.results, whole=frozenset(allowed.keys() - found.allowed.keys()))


@dataclass(frozen=True)
class DataParallel(Method):
    """Splits the batch over every axis; parameters and optimizer state are on every device. Options: see `Method`.

    Examples:
        >>> import jax, jax.numpy as jnp, meshwright as mw
        >>> step = lambda w, x: (w - jax.grad(lambda w: ((x @ w) ** 2).mean())(w), x.max())
        >>> plan = mw.plan(step, jnp.ones((4, 4)), jnp.ones((8, 4)), cluster="1x4 h100", method=mw.DataParallel())
        >>> [tuple(spec) for spec in plan.in_shardings]
        [(), ('x',)]
    """

    def divided(self, graph: Graph, meshes: list[Mesh]) -> list[Mesh]:
        return [divided_view(graph, meshes[0], ())]

    @property
    def spreads_batch(self) -> bool:
        return True

    def pins(self, graph: Graph, roles: Roles) -> dict[int, Hashable]:
        return _by_role(roles)

    def restrict(self, graph: Graph, roles: Roles, mesh: Mesh, axes: Axes) -> Restrictions:
        whole = {v: frozenset({0}) for v in (*roles.parameters, *roles.optimizer)}
        split = split_batch(graph, roles, mesh, axes, range(axes.num_axes))
        return Restrictions(whole | split, whole=frozenset(whole))


@dataclass(frozen=True)
class Zero(Method):
    """Data parallel with the state spread out as well (ZeRO).

    Args:
        stage: 1 splits the optimizer state, 2 the gradients too, 3 the parameters too (FSDP).
        group: How many neighbouring devices share one copy of the state, e.g. those of a host (hybrid sharding, HSDP);
            None for all devices.
        memory_fraction, seconds: As in every `Method`.

    Examples:
        >>> import jax, jax.numpy as jnp, meshwright as mw
        >>> step = lambda w, x: (w - jax.grad(lambda w: ((x @ w) ** 2).mean())(w), x.max())
        >>> plan = mw.plan(step, jnp.ones((4, 4)), jnp.ones((8, 4)), cluster="1x4 h100", method=mw.Zero(3))
        >>> [tuple(spec) for spec in plan.in_shardings]
        [(None, 'x'), ('x',)]
    """

    stage: int = 1
    group: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage not in (1, 2, 3):
            raise ShardingError(f"Zero stage is {self.stage!r}; ZeRO has stages 1, 2 and 3")
        if self.group is not None and (type(self.group) is not int or self.group < 1):
            raise ShardingError(f"group is {self.group!r}; give how many devices share one copy of the state, or None")

    @property
    def name(self) -> str:
        return f"Zero-{self.stage}" + (f" in groups of {self.group}" if self.group else "")

    def meshes(self, cluster: Cluster) -> list[Mesh]:
        if self.group is None:
            return super().meshes(cluster)
        if cluster.num_devices % self.group:
            raise ShardingError(
                f"groups of {self.group} devices do not divide the {cluster.num_devices} devices of cluster "
                f"{cluster.name!r}; give a divisor, such as group={cluster.devices_per_host}"
            )
        return [cluster.mesh((cluster.num_devices // self.group, self.group))]

    def divided(self, graph: Graph, meshes: list[Mesh]) -> list[Mesh]:
        return [divided_view(graph, meshes[0], self._spread(find_roles(graph)))]

    @property
    def spreads_batch(self) -> bool:
        return True

    def _spread(self, roles: Roles) -> tuple[int, ...]:
        return (*roles.optimizer, *(roles.parameters if self.stage == 3 else ()))

    def pins(self, graph: Graph, roles: Roles) -> dict[int, Hashable]:
        return _by_role(roles)

    def restrict(self, graph: Graph, roles: Roles, mesh: Mesh, axes: Axes) -> Restrictions:
        allowed = split_batch(graph, roles, mesh, axes, range(axes.num_axes))
        whole = () if self.stage == 3 else roles.parameters
        allowed |= {v: frozenset({0}) for v in whole}
        over = None if self.group is None else axes.num_axes - 1
        if over is not None and axes.sizes[over] != self.group:
            raise ShardingError(
                f"the last axis of mesh {mesh.shape} has {axes.sizes[over]} devices, and a copy of the state is shared "
                f"by group={self.group}; give a mesh whose last axis has {self.group}, or leave the mesh out"
            )
        allowed |= {v: most_split(graph.types[v].shape, axes, over) for v in self._spread(roles)}
        spread = frozenset((range(axes.num_axes) if over is None else (over,)) if self.stage > 1 else ())
        return Restrictions(allowed, scatter_gradients=self.stage > 1, scattered=spread, whole=frozenset(whole))


@dataclass(frozen=True)
class TensorParallel(Method):
    """Splits every parameter matrix over the last axis, without gathering it, and the batch over the other axes.

    On a cluster of several hosts the last axis is a host's devices, on one host it is all of them.

    Args:
        zero: What the devices that share the batch split as well, as in `Zero`: 1 the optimizer state, 2 the gradients
            too, 3 the parameters too; 0 nothing.
        memory_fraction, seconds: As in every `Method`.

    Examples:
        >>> import jax, jax.numpy as jnp, meshwright as mw
        >>> step = lambda w, x: (w - jax.grad(lambda w: ((x @ w) ** 2).mean())(w), x.max())
        >>> plan = mw.plan(step, jnp.ones((4, 4)), jnp.ones((8, 4)), cluster="2x2 h100", method=mw.TensorParallel())
        >>> plan.mesh.shape, [tuple(spec) for spec in plan.in_shardings]
        ({'x': 2, 'y': 2}, [(None, 'y'), ('x',)])
    """

    zero: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.zero not in (0, 1, 2, 3):
            raise ShardingError(f"zero is {self.zero!r}; ZeRO has stages 1, 2 and 3, and 0 stands for none")

    @property
    def name(self) -> str:
        return type(self).__name__ + (f" with ZeRO-{self.zero}" if self.zero else "")

    def meshes(self, cluster: Cluster) -> list[Mesh]:
        if cluster.num_hosts > 1 and cluster.devices_per_host > 1:
            return [cluster.mesh((cluster.num_hosts, cluster.devices_per_host))]
        return super().meshes(cluster)

    def pins(self, graph: Graph, roles: Roles) -> dict[int, Hashable]:
        return _by_role(roles)

    def restrict(self, graph: Graph, roles: Roles, mesh: Mesh, axes: Axes) -> Restrictions:
        last = axes.num_axes - 1
        allowed = split_batch(graph, roles, mesh, axes, range(last))
        spread = (*(roles.optimizer if self.zero else ()), *(roles.parameters if self.zero == 3 else ()))
        for value in roles.parameters:
            allowed[value] = split_over(graph.types[value].shape, axes, last)
        for value in spread:
            allowed[value] = most_split_along(graph.types[value].shape, axes, last)
        matrices = frozenset(v for v in roles.parameters if len(graph.types[v].shape) > 1)
        others = frozenset(range(last))
        scattered = others if self.zero > 1 else frozenset[int]()
        return Restrictions(allowed, scattered=scattered, stay=matrices, gathered=others)


NAMED: tuple[Method, ...] = (DataParallel(), Zero(1), Zero(2), Zero(3), TensorParallel())


def _by_role(roles: Roles) -> dict[int, Hashable]:
    named = (("parameters", roles.parameters), ("optimizer", roles.optimizer), ("data", roles.data))
    return {value: name for name, values in named for value in values}
