"""Tasks of one virtual stage of a recipe: kernels on the compute lane, and exchanges that overlap or block it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from meshwright.cost.rates import Rates
from meshwright.simulator.transformer.exchange import Exchange
from meshwright.simulator.transformer.layer import Kernel, Layer
from meshwright.simulator.transformer.recipe import Recipe
from meshwright.simulator.work import COMPUTE, GRADIENTS, Task, Tasks

_LANE = "compute"

#: The products that a block begins with: their inputs' gradients are partial sums.
_FIRST = ("query", "key", "value", "gate", "up")


@dataclass
class _List:
    """A list of tasks under construction; the next compute task waits for the blocking exchanges before it."""

    tasks: list[Task] = field(default_factory=list)
    blocking: tuple[int, ...] = ()
    last: tuple[int, ...] = ()  # the last compute task

    def compute(self, name: str, seconds: float) -> None:
        if seconds > 0:
            self.tasks.append(Task(name, COMPUTE, _LANE, seconds, "", self.blocking))
            self.blocking, self.last = (), (len(self.tasks) - 1,)

    def beside(self, task: Task) -> tuple[int, ...]:
        """Adds an exchange that compute does not wait for; returns its place."""
        if task.seconds <= 0:
            return ()
        self.tasks.append(task)
        return (len(self.tasks) - 1,)

    def in_the_way(self, task: Task) -> None:
        """Adds an exchange that waits for the compute before it and that the compute after it waits for."""
        self.wait(self.beside(task._replace(needs=(*task.needs, *self.last, *self.blocking))))

    def wait(self, places: tuple[int, ...]) -> None:
        self.blocking = (*self.blocking, *places)


@dataclass(frozen=True)
class StageTasks:
    """Makes the tasks of a run of layers.

    Attributes:
        recipe: The recipe.
        kernels: Prices kernels.
        exchange: Prices collectives.
        layers: Number of layers.
        first: Whether the embedding belongs to it.
        last: Whether the head belongs to it.
    """

    recipe: Recipe
    kernels: Rates
    exchange: Exchange
    layers: int
    first: bool
    last: bool

    def forward(self) -> Tasks:
        """One microbatch forward."""
        out, layer = _List(), Layer(self.recipe, self.kernels)
        attention, feed_forward = tuple(layer.attention_block()), tuple(layer.feed_forward_block())
        if self.first:
            self._fetch(out, "embedding", self.recipe.shape.embedding_params, ahead=())
            out.compute("embedding", layer.embedding().forward_s)
        before: tuple[int, ...] = ()
        for _ in range(self.layers):
            before = self._fetch(out, "parameters", self.recipe.layer_params, ahead=before)
            self._layer_forward(out, attention, feed_forward)
        if self.last:
            self._fetch(out, "head", self.recipe.shape.embedding_params, ahead=before)
            for kernel in layer.head():
                out.compute(kernel.name, kernel.forward_s)
        return tuple(out.tasks)

    def backward(self, sync: bool) -> Tasks:
        """One microbatch backward, recomputation included; `sync` exchanges the gradients at the end of a step."""
        out, layer = _List(), Layer(self.recipe, self.kernels)
        attention, feed_forward = tuple(layer.attention_block()), tuple(layer.feed_forward_block())
        embedding = self.recipe.shape.embedding_params
        if self.last:
            for kernel in reversed(tuple(layer.head())):
                out.compute(kernel.name, kernel.backward_s)
            self._give(out, "head", embedding, sync)
        before: tuple[int, ...] = ()
        repeated = 0.0
        for _ in range(self.layers):
            if self.recipe.zero == 3:
                before = self._fetch(out, "parameters", self.recipe.layer_params, ahead=before)
            repeated += self.recipe.recompute.share
            if repeated >= 1 - 1e-9:
                repeated -= 1
                self._repeat(out, attention, feed_forward)
            self._layer_backward(out, attention, feed_forward)
            self._give(out, "gradients", self.recipe.layer_params, sync)
        if self.first:
            out.compute("embedding", layer.embedding().backward_s)
            self._give(out, "embedding", 0 if self.last and self.recipe.shape.tied else embedding, sync)
        return tuple(out.tasks)

    def _layer_forward(self, out: _List, attention: Iterable[Kernel], feed_forward: Iterable[Kernel]) -> None:
        self._gather(out)
        for kernel in attention:
            self._kernel(out, kernel, kernel.forward_s, passes=1.0)
        self._settle(out)
        self._gather(out)
        self._experts(out)
        for kernel in feed_forward:
            self._kernel(out, kernel, kernel.forward_s, passes=1.0)
        self._experts(out)
        self._settle(out)

    def _layer_backward(self, out: _List, attention: tuple[Kernel, ...], feed_forward: tuple[Kernel, ...]) -> None:
        # Backward, gathering and summing change places, and take the same time.
        self._gather(out)
        self._experts(out)
        self._block_backward(out, feed_forward)
        self._experts(out)
        self._gather(out)
        self._block_backward(out, attention)
        if self.recipe.num_microbatches > 1 and self.recipe.zero < 3:
            added = 8.0 if self.recipe.stack.fused_accumulation else 2 + 2 * self.recipe.stack.gradient_bytes
            out.compute(
                "accumulate gradients", self.kernels.stream_s(added * self.recipe.layer_params / self.recipe.tensor)
            )

    def _block_backward(self, out: _List, block: tuple[Kernel, ...]) -> None:
        """A block from its end to its first products, whose inputs' gradients are then summed up."""
        norm, *others = block
        firsts = [kernel for kernel in others if kernel.name in _FIRST]
        for kernel in reversed(others):
            if kernel not in firsts:
                self._kernel(out, kernel, kernel.backward_s, passes=2.0)
        beside = self.recipe.stack.sums_beside_weights
        for kernel in reversed(firsts):
            out.compute(kernel.name, kernel.backward_s - (kernel.weights_s if beside else 0.0))
        if beside:
            sums = self._sum_task(out.last)
            place = out.beside(sums)
            for kernel in reversed(firsts):
                out.compute(f"{kernel.name} weights", kernel.weights_s)
            out.wait(place)
        else:
            self._settle(out)
        out.compute(norm.name, norm.backward_s)

    def _kernel(self, out: _List, kernel: Kernel, seconds: float, passes: float) -> None:
        """A kernel; with context parallelism keys and values go round beside attention's, gradients as well."""
        r = self.recipe
        sent: tuple[int, ...] = ()
        if kernel.name == "attention" and r.context > 1:
            num_bytes = 4.0 * r.tokens * r.shape.kv_width / r.tensor
            one = self.exchange.task("keys and values", "context", "permute", r.context, r.tensor, num_bytes)
            sent = out.beside(one._replace(seconds=passes * (r.context - 1) * one.seconds, needs=out.last))
        out.compute(kernel.name, seconds)
        out.wait(sent)

    def _repeat(self, out: _List, attention: tuple[Kernel, ...], feed_forward: tuple[Kernel, ...]) -> None:
        """The kernels that recomputation repeats, and the exchanges that they need."""
        rule = self.recipe.recompute
        for block, product in ((attention, "out"), (feed_forward, "down")):
            repeated = [kernel for kernel in block if kernel.name in rule.repeats]
            if product == "down" and not self.recipe.stack.repeats_last:
                repeated = [kernel for kernel in repeated if kernel.name not in ("down", "residual")]
            names = {kernel.name for kernel in repeated}
            if not names.isdisjoint(_FIRST):
                self._gather(out)
            for kernel in repeated:
                out.compute(f"{kernel.name} again", kernel.forward_s)
            if product in names and "down" not in rule.keeps:  # a rule that keeps the last product keeps sums
                self._settle(out)

    def _gather(self, out: _List) -> None:
        """Sequence parallelism: tokens come together before a block's products."""
        r = self.recipe
        if r.stack.sequence_parallel:
            num_bytes = 2.0 * r.tokens * r.shape.hidden
            task = self.exchange.task("gather tokens", "tensor", "all_gather", r.tensor, 1, num_bytes)
            self._exchange_tokens(out, task)

    def _settle(self, out: _List) -> None:
        """Tensor parallelism: partial sums are added up after a block's last product."""
        self._exchange_tokens(out, self._sum_task(()))

    def _sum_task(self, needs: tuple[int, ...]) -> Task:
        r = self.recipe
        kind = "reduce_scatter" if r.stack.sequence_parallel else "all_reduce"
        num_bytes = 2.0 * r.tokens * r.shape.hidden
        return self.exchange.task("sum activations", "tensor", kind, r.tensor, 1, num_bytes, needs)

    def _exchange_tokens(self, out: _List, task: Task) -> None:
        """Among tensor-parallel devices; cut up, only the first piece stands in the way of the products."""
        if not self.recipe.stack.async_tensor:
            out.in_the_way(task)
            return
        piece = task.seconds / self.recipe.tensor
        out.beside(task._replace(lane="pieces", seconds=task.seconds - piece, needs=out.last))
        out.in_the_way(task._replace(seconds=piece))

    def _experts(self, out: _List) -> None:
        """Tokens go to their experts, or come back."""
        r = self.recipe
        num_bytes = 2.0 * r.tokens * r.shape.hidden * r.shape.active * r.expert
        stride = r.tensor * r.context
        out.in_the_way(self.exchange.task("tokens to experts", "experts", "all_to_all", r.expert, stride, num_bytes))

    def _fetch(self, out: _List, name: str, params: float, ahead: tuple[int, ...]) -> tuple[int, ...]:
        """ZeRO-3: parameters are prefetched during the layer before; returns the dependencies of the next fetch."""
        r = self.recipe
        if r.zero < 3:
            return ()
        num_bytes = 2.0 * params / r.tensor
        task = self._in_messages(f"fetch {name}", "fetch", "all_gather", num_bytes)
        if not r.stack.overlap:
            out.in_the_way(task)
            return ()
        out.wait(out.beside(task._replace(needs=ahead)))
        return out.last

    def _in_messages(self, name: str, lane: str, kind: str, num_bytes: float) -> Task:
        """An exchange of ZeRO-3: one message a layer, or as many as the stack sends."""
        r, num = self.recipe, self.recipe.stack.messages
        one = self.exchange.task(name, lane, kind, r.shard, r.tensor, num_bytes / num)
        return one._replace(seconds=num * one.seconds, num_bytes=num_bytes)

    def _give(self, out: _List, name: str, params: float, sync: bool) -> None:
        """Gradients go to where they are kept: for every microbatch with ZeRO-3, else at the end of a step."""
        for task in self.gradient_tasks(name, params, sync):
            if self.recipe.stack.overlap:
                out.beside(task._replace(needs=out.last))
            elif self.recipe.zero == 3:
                out.in_the_way(task)

    def gradient_tasks(self, name: str, params: float, sync: bool) -> list[Task]:
        """The exchange of some parameters' gradients, and of the parameters that follow from them."""
        r = self.recipe
        whole, shard, stride = params / r.tensor, r.shard, r.tensor
        sent = r.stack.reduce_bytes * whole
        tasks = []
        if r.zero == 3:
            tasks.append(self._in_messages(f"reduce {name}", GRADIENTS, "reduce_scatter", sent))
        elif sync and r.zero > 0:
            tasks.append(self.exchange.task(f"reduce {name}", GRADIENTS, "reduce_scatter", shard, stride, sent))
            tasks.append(self.exchange.task(f"spread {name}", GRADIENTS, "all_gather", shard, stride, 2.0 * whole))
        elif sync:
            num = r.data * r.context
            tasks.append(self.exchange.task(f"reduce {name}", GRADIENTS, "all_reduce", num, stride, sent))
        copies = r.data * r.context // shard
        if sync and r.zero > 0 and copies > 1:
            part = sent / shard
            tasks.append(self.exchange.task(f"reduce {name}", GRADIENTS, "all_reduce", copies, stride * shard, part))
        return [task for task in tasks if task.seconds > 0]
