"""The programs in plain JAX: parameters are dicts, layers are functions."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.matrix.parts import COLOURS, DROPPED, EXPERTS, HIDDEN, LAYERS, WIDTH, WORDS, attend, error, experts
from tests.matrix.precision import RANK, Precision, fp8_dot, lora_dot, quantized
from tests.matrix.training import Model, Training, trained


def training(program: str, precision: Precision) -> Training:
    """One program in one precision."""
    net = _Net(program, precision)

    def init(key: Any, batch: Any) -> Any:
        params = net.init(key)
        stats = params.pop("stats", {})
        return _frozen_apart(params, stats)

    def loss(params: Any, rest: Any, batch: Any, key: Any) -> Any:
        frozen, stats = rest
        whole = jax.tree.map(lambda a, b: b if a is None else a, params, frozen, is_leaf=lambda x: x is None)
        logits, stats = net(precision.cast(whole), stats, batch, key)
        return error(logits, batch), (frozen, stats)

    return trained(program, precision, Model(init, loss))


def _frozen_apart(params: Any, stats: Any) -> Any:
    """Parameters with None for what is frozen; what is frozen with None for the others, and the statistics."""

    def keeps(frozen: bool) -> Any:
        def keep(path: Any, leaf: Any) -> Any:
            return leaf if (getattr(path[-1], "key", None) in ("q", "scale")) is frozen else None

        return jax.tree_util.tree_map_with_path(keep, params)

    return keeps(False), (keeps(True), stats)


class _Net:
    """The model of a program."""

    def __init__(self, program: str, precision: Precision):
        self.program = program
        self.precision = precision

    # --- parameters ---

    def init(self, key: Any) -> dict[str, Any]:
        keys = iter(jax.random.split(key, 64))
        if self.program == "convolution":
            return self._convolutions(keys)
        embed = self._normal(next(keys), (WORDS, WIDTH))
        layers: Any = [self._layer(keys) for _ in range(LAYERS)]
        if self.program == "scan":
            layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        params = {"embed": embed, "layers": layers, "norm": jnp.ones(WIDTH, self.precision.params)}
        if self.program != "tied embedding":
            params["head"] = self._dense(keys, WIDTH, WORDS)
        return params

    def _normal(self, key: Any, shape: tuple[int, ...]) -> Any:
        return (jax.random.normal(key, shape) / shape[-2] ** 0.5).astype(self.precision.params)

    def _dense(self, keys: Any, rows: int, columns: int) -> Any:
        w = self._normal(next(keys), (rows, columns))
        if self.precision.kind != "lora":
            return {"w": w, "b": jnp.zeros(columns, w.dtype)}
        q, scale = quantized(w)
        return {"q": q, "scale": scale, "a": self._normal(next(keys), (rows, RANK)), "b": jnp.zeros((RANK, columns))}

    def _layer(self, keys: Any) -> Any:
        layer = {"norm": jnp.ones(WIDTH, self.precision.params)}
        if self.program == "encoder-decoder":
            layer |= {name: self._dense(keys, WIDTH, WIDTH) for name in ("query", "key", "value")}
        if self.program.startswith("MoE"):
            layer |= {"router": self._normal(next(keys), (WIDTH, EXPERTS))}
            shapes = {"up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
            return layer | {name: self._normal(next(keys), shape) for name, shape in shapes.items()}
        return layer | {"up": self._dense(keys, WIDTH, HIDDEN), "down": self._dense(keys, HIDDEN, WIDTH)}

    def _convolutions(self, keys: Any) -> Any:
        params: dict[str, Any] = {"head": self._dense(keys, WIDTH, WORDS), "stats": []}
        params["convs"] = [self._normal(next(keys), (3, 3, c, WIDTH)) for c in (COLOURS, WIDTH)]
        params["gains"] = [jnp.ones(WIDTH, self.precision.params) for _ in range(2)]
        params["stats"] = [{"mean": jnp.zeros(WIDTH), "var": jnp.ones(WIDTH)} for _ in range(2)]
        return params

    # --- the forward pass ---

    def __call__(self, params: Any, stats: Any, batch: Any, key: Any) -> Any:
        if self.program == "convolution":
            return self._classify(params, stats, batch["x"])
        x = params["embed"][batch["x"]]
        if self.program == "scan":
            x = lax.scan(lambda x, layer: (self._block(layer, x), None), x, params["layers"])[0]
        elif self.program == "encoder-decoder":
            x = self._decode(params, x, params["embed"][batch["target"]])
        else:
            block = self._block
            if self.program == "checkpoint":
                block = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
            for number, layer in enumerate(params["layers"]):
                x = block(layer, x)
                if self.program == "dropout":
                    kept = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - DROPPED, x.shape)
                    x = jnp.where(kept, x / (1 - DROPPED), 0).astype(x.dtype)
        x = _norm(x, params["norm"])
        return x @ params["embed"].T if self.program == "tied embedding" else self._apply(params["head"], x), stats

    def _apply(self, layer: Any, x: Any) -> Any:
        if self.precision.kind == "lora":
            return lora_dot(x, layer["q"], layer["scale"], layer["a"], layer["b"])
        product = fp8_dot(x, layer["w"]) if self.precision.kind == "fp8" else x @ layer["w"]
        return product + layer["b"]

    def _block(self, layer: Any, x: Any, read: Any = None) -> Any:
        y = _norm(x, layer["norm"])
        if self.program == "encoder-decoder":
            over = y if read is None else read
            x = x + attend(
                self._apply(layer["query"], y), self._apply(layer["key"], over), self._apply(layer["value"], over)
            )
            y = _norm(x, layer["norm"])
        if self.program.startswith("MoE"):
            return x + experts(self.program, y, layer["router"], layer["up"], layer["down"])
        return x + self._apply(layer["down"], jax.nn.gelu(self._apply(layer["up"], y)))

    def _decode(self, params: Any, source: Any, target: Any) -> Any:
        encoder, decoder = params["layers"][: LAYERS // 2], params["layers"][LAYERS // 2 :]
        for layer in encoder:
            source = self._block(layer, source)
        for layer in decoder:
            target = self._block(layer, target, source)
        return target

    def _classify(self, params: Any, stats: Any, x: Any) -> Any:
        x, after = x.astype(self.precision.compute), []
        for kernel, gain, old in zip(params["convs"], params["gains"], stats, strict=True):
            y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            wide = y.astype(jnp.float32)
            mean, var = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
            x = jax.nn.relu((wide - mean) * lax.rsqrt(var + 1e-5) * gain).astype(y.dtype)
            after.append({"mean": 0.9 * old["mean"] + 0.1 * mean, "var": 0.9 * old["var"] + 0.1 * var})
        return self._apply(params["head"], x.mean((1, 2))), after


def _norm(x: Any, gain: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * gain
