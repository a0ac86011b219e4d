"""Images, video and volumes."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from strangers import Program, Tree, stranger, trained

BF16 = jnp.bfloat16


def _images(batch: int, *shape: int, classes: int = 1000, dtype: Any = BF16) -> Any:
    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {
            "image": jax.random.normal(a, (batch, *shape)).astype(dtype),
            "label": jax.random.randint(b, (batch,), 0, classes),
        }

    return sample


def _classifier(model: nn.Module, shape: tuple[int, ...], sample: Any, optimizer: Any) -> Program:
    def init(key: jax.Array) -> Tree:
        return model.init(key, jnp.zeros((1, *shape), BF16))

    def loss(variables: Tree, batch: Tree) -> jax.Array:
        logits, _ = model.apply(variables, batch["image"], mutable=["batch_stats"])
        labels = optax.smooth_labels(jax.nn.one_hot(batch["label"], logits.shape[-1]), 0.1)
        return optax.softmax_cross_entropy(logits.astype(jnp.float32), labels).mean()

    return trained(init, loss, sample, optimizer)


def _norm() -> nn.Module:
    return nn.BatchNorm(use_running_average=False, dtype=BF16)


class _Bottleneck(nn.Module):
    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = lambda f, k, s=1: nn.Conv(f, (k, k), (s, s), use_bias=False, dtype=BF16)
        y = nn.relu(_norm()(conv(self.features, 1)(x)))
        y = nn.relu(_norm()(conv(self.features, 3, self.stride)(y)))
        y = _norm()(conv(4 * self.features, 1)(y))
        if x.shape != y.shape:
            x = _norm()(conv(4 * self.features, 1, self.stride)(x))
        return nn.relu(x + y)


class _ResNet(nn.Module):
    depths: tuple[int, ...]
    width: int
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(_norm()(nn.Conv(self.width, (7, 7), (2, 2), use_bias=False, dtype=BF16)(x)))
        x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for stage, depth in enumerate(self.depths):
            for block in range(depth):
                x = _Bottleneck(self.width * 2**stage, 2 if stage and not block else 1)(x)
        return nn.Dense(self.classes, dtype=BF16)(x.mean((1, 2)))


@stranger({"batch": 8, "side": 16, "depths": (1, 1), "width": 8}, batch=128, side=224, depths=(3, 4, 6, 3), width=64)
def resnet50(batch: int, side: int, depths: tuple[int, ...], width: int) -> Program:
    """ResNet-50 in bfloat16 with batch normalisation and momentum."""
    model = _ResNet(depths, width, 1000)
    return _classifier(model, (side, side, 3), _images(batch, side, side, 3), optax.sgd(0.1, 0.9, nesterov=True))


class _ConvNeXt(nn.Module):
    depths: tuple[int, ...]
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = lambda y: nn.LayerNorm(dtype=BF16)(y)
        x = norm(nn.Conv(self.width, (4, 4), (4, 4), dtype=BF16)(x))
        for stage, depth in enumerate(self.depths):
            features = self.width * 2**stage
            if stage:
                x = nn.Conv(features, (2, 2), (2, 2), dtype=BF16)(norm(x))
            for _ in range(depth):
                y = nn.Conv(features, (7, 7), feature_group_count=features, dtype=BF16)(x)
                y = nn.Dense(features, dtype=BF16)(nn.gelu(nn.Dense(4 * features, dtype=BF16)(norm(y))))
                x = x + y * self.param(f"gamma{stage}{_}", nn.initializers.constant(1e-6), (features,)).astype(BF16)
        return nn.Dense(1000, dtype=BF16)(norm(x.mean((1, 2))))


@stranger({"batch": 8, "side": 32, "depths": (1, 1), "width": 8}, batch=64, side=224, depths=(3, 3, 9, 3), width=96)
def convnext(batch: int, side: int, depths: tuple[int, ...], width: int) -> Program:
    """ConvNeXt-T: 7 × 7 depthwise convolutions, layer normalisation."""
    return _classifier(_ConvNeXt(depths, width), (side, side, 3), _images(batch, side, side, 3), optax.adamw(4e-3))


class _MBConv(nn.Module):
    features: int
    expand: int
    kernel: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.shape[-1] * self.expand
        y = nn.silu(_norm()(nn.Conv(wide, (1, 1), use_bias=False, dtype=BF16)(x))) if self.expand > 1 else x
        window, strides = (self.kernel, self.kernel), (self.stride, self.stride)
        y = nn.Conv(wide, window, strides, feature_group_count=wide, use_bias=False, dtype=BF16)(y)
        y = nn.silu(_norm()(y))
        squeezed = nn.silu(nn.Dense(max(x.shape[-1] // 4, 1), dtype=BF16)(y.mean((1, 2), keepdims=True)))
        y = y * nn.sigmoid(nn.Dense(wide, dtype=BF16)(squeezed))
        y = _norm()(nn.Conv(self.features, (1, 1), use_bias=False, dtype=BF16)(y))
        return x + y if x.shape == y.shape else y


class _EfficientNet(nn.Module):
    stages: tuple[tuple[int, int, int, int, int], ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.silu(_norm()(nn.Conv(32, (3, 3), (2, 2), use_bias=False, dtype=BF16)(x)))
        for expand, features, depth, stride, kernel in self.stages:
            for block in range(depth):
                x = _MBConv(features, expand, kernel, 1 if block else stride)(x)
        x = nn.silu(_norm()(nn.Conv(4 * x.shape[-1], (1, 1), use_bias=False, dtype=BF16)(x)))
        return nn.Dense(1000, dtype=BF16)(x.mean((1, 2)))


_B0 = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


@stranger({"batch": 8, "side": 16, "stages": ((1, 8, 1, 1, 3), (2, 8, 2, 2, 5))}, batch=128, side=224, stages=_B0)
def efficientnet(batch: int, side: int, stages: tuple[tuple[int, int, int, int, int], ...]) -> Program:
    """EfficientNet-B0: inverted bottlenecks, squeeze and excitation, RMSProp with a moving average of weights."""
    optimizer = optax.chain(optax.rmsprop(0.016, momentum=0.9), optax.ema(0.9999))
    return _classifier(_EfficientNet(stages), (side, side, 3), _images(batch, side, side, 3), optimizer)


class _Swin(nn.Module):
    depths: tuple[int, ...]
    width: int
    window: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.LayerNorm(dtype=BF16)(nn.Conv(self.width, (4, 4), (4, 4), dtype=BF16)(x))
        for stage, depth in enumerate(self.depths):
            if stage:
                b, h, w, c = x.shape
                x = x.reshape(b, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 2, 4, 5).reshape(b, h // 2, w // 2, 4 * c)
                x = nn.Dense(2 * c, use_bias=False, dtype=BF16)(nn.LayerNorm(dtype=BF16)(x))
            for block in range(depth):
                x = x + self.attend(nn.LayerNorm(dtype=BF16)(x), self.window // 2 * (block % 2), f"b{stage}{block}")
                y = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=BF16)(nn.LayerNorm(dtype=BF16)(x)))
                x = x + nn.Dense(x.shape[-1], dtype=BF16)(y)
        return nn.Dense(1000, dtype=BF16)(x.mean((1, 2)))

    def attend(self, x: jax.Array, shift: int, name: str) -> jax.Array:
        (b, h, w, c), n = x.shape, self.window
        heads = max(c // 32, 1)
        x = jnp.roll(x, (-shift, -shift), (1, 2)) if shift else x
        x = x.reshape(b, h // n, n, w // n, n, c).transpose(0, 1, 3, 2, 4, 5).reshape(-1, n * n, c)
        q, k, v = jnp.split(nn.Dense(3 * c, dtype=BF16)(x).reshape(-1, n * n, heads, 3 * c // heads), 3, -1)
        grid = jnp.stack(jnp.meshgrid(jnp.arange(n), jnp.arange(n), indexing="ij"), -1).reshape(-1, 2)
        gap = grid[:, None] - grid[None] + n - 1
        bias = self.param(name, nn.initializers.normal(0.02), ((2 * n - 1) ** 2, heads))
        bias = bias[gap[..., 0] * (2 * n - 1) + gap[..., 1]].transpose(2, 0, 1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1]).astype(BF16) + bias.astype(BF16)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(-1, n * n, c)
        y = nn.Dense(c, dtype=BF16)(y).reshape(b, h // n, w // n, n, n, c).transpose(0, 1, 3, 2, 4, 5)
        y = y.reshape(b, h, w, c)
        return jnp.roll(y, (shift, shift), (1, 2)) if shift else y


@stranger(
    {"batch": 8, "side": 32, "depths": (2, 2), "width": 32, "window": 4},
    batch=64,
    side=224,
    depths=(2, 2, 6, 2),
    width=96,
    window=7,
)
def swin(batch: int, side: int, depths: tuple[int, ...], width: int, window: int) -> Program:
    """Swin-T: attention in shifted windows with a looked-up bias."""
    model = _Swin(depths, width, window)
    return _classifier(model, (side, side, 3), _images(batch, side, side, 3), optax.adamw(1e-3))


class _Video(nn.Module):
    width: int
    depth: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(_norm()(nn.Conv(self.width, (3, 7, 7), (1, 2, 2), use_bias=False, dtype=BF16)(x)))
        for stage in range(self.depth):
            features, strides = self.width * 2**stage, (2, 2, 2) if stage else (1, 1, 1)
            y = nn.relu(_norm()(nn.Conv(features, (3, 3, 3), strides, use_bias=False, dtype=BF16)(x)))
            y = _norm()(nn.Conv(features, (3, 3, 3), use_bias=False, dtype=BF16)(y))
            if x.shape != y.shape:
                x = _norm()(nn.Conv(features, (1, 1, 1), strides, use_bias=False, dtype=BF16)(x))
            x = nn.relu(x + y)
        return nn.Dense(400, dtype=BF16)(x.mean((1, 2, 3)))


@stranger(
    {"batch": 8, "frames": 4, "side": 16, "width": 8, "depth": 2}, batch=8, frames=16, side=112, width=64, depth=4
)
def video_r3d(batch: int, frames: int, side: int, width: int, depth: int) -> Program:
    """R3D: three-dimensional convolutions over clips."""
    shape = (frames, side, side, 3)
    return _classifier(_Video(width, depth), shape, _images(batch, *shape, classes=400), optax.sgd(0.01, 0.9))


class _Segmenter(nn.Module):
    width: int
    depth: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def block(y: jax.Array, features: int) -> jax.Array:
            for _ in range(2):
                y = nn.leaky_relu(nn.GroupNorm(8, dtype=jnp.float32)(nn.Conv(features, (3, 3, 3))(y)))
            return y

        skips = []
        for level in range(self.depth):
            x = block(x, self.width * 2**level)
            skips.append(x)
            x = nn.max_pool(x, (2, 2, 2), (2, 2, 2))
        x = block(x, self.width * 2**self.depth)
        for level in reversed(range(self.depth)):
            x = nn.ConvTranspose(self.width * 2**level, (2, 2, 2), (2, 2, 2))(x)
            x = block(jnp.concatenate([x, skips[level]], -1), self.width * 2**level)
        return nn.Conv(4, (1, 1, 1))(x)


@stranger({"batch": 8, "side": 8, "width": 8, "depth": 1}, batch=2, side=96, width=16, depth=3)
def volume_unet(batch: int, side: int, width: int, depth: int) -> Program:
    """nnU-Net on volumes in float32, with Dice's loss."""
    model = _Segmenter(width, depth)

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        shape = (batch, side, side, side)
        return {"image": jax.random.normal(a, (*shape, 1)), "label": jax.random.randint(b, shape, 0, 4)}

    def loss(params: Tree, batch: Tree) -> jax.Array:
        parts = jax.nn.softmax(model.apply(params, batch["image"]))
        truth = jax.nn.one_hot(batch["label"], 4)
        both, either = (parts * truth).sum((1, 2, 3)), (parts + truth).sum((1, 2, 3))
        return 1 - (2 * both / (either + 1e-5)).mean() - (truth * jnp.log(parts + 1e-8)).sum(-1).mean()

    return trained(lambda key: model.init(key, jnp.zeros((1, side, side, side, 1))), loss, sample)


@stranger({"batch": 8, "side": 16, "width": 16, "depth": 2}, batch=512, side=32, width=256, depth=8)
def mlp_mixer(batch: int, side: int, width: int, depth: int) -> Program:
    """An MLP-Mixer on small images, each written-out layer vmapped over examples, parameters stacked in a scan."""

    def init(key: jax.Array) -> Tree:
        tokens, ks = (side // 4) ** 2, iter(jax.random.split(key, 6))
        normal = lambda *shape: jax.random.normal(next(ks), shape) * shape[-2] ** -0.5
        layers = {
            "token1": normal(depth, tokens, 2 * tokens),
            "token2": normal(depth, 2 * tokens, tokens),
            "channel1": normal(depth, width, 4 * width),
            "channel2": normal(depth, 4 * width, width),
        }
        return {"patch": normal(48, width), "layers": layers, "head": normal(width, 10)}

    def one(params: Tree, image: jax.Array) -> jax.Array:
        patches = image.reshape(side // 4, 4, side // 4, 4, 3).swapaxes(1, 2).reshape(-1, 48)

        def layer(x: jax.Array, p: Tree) -> tuple[jax.Array, None]:
            y = jax.nn.standardize(x).T
            x = x + (jax.nn.gelu(y @ p["token1"]) @ p["token2"]).T
            return x + jax.nn.gelu(jax.nn.standardize(x) @ p["channel1"]) @ p["channel2"], None

        x, _ = jax.lax.scan(layer, patches @ params["patch"], params["layers"])
        return x.mean(0) @ params["head"]

    def loss(params: Tree, batch: Tree) -> jax.Array:
        logits = jax.vmap(one, (None, 0))(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    sample = _images(batch, side, side, 3, classes=10, dtype=jnp.float32)
    return trained(init, loss, sample, optax.adam(1e-3))
