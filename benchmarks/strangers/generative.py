"""Models that draw: diffusion, adversaries, flows, autoencoders, radiance fields."""

import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from strangers import Program, Tree, stranger, trained

BF16 = jnp.bfloat16


def _times(t: jax.Array, dim: int) -> jax.Array:
    angles = t[:, None] * jnp.exp(-math.log(10000) * jnp.arange(dim // 2) / (dim // 2))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


def _noised(batch: int, *shape: int) -> Tree:
    def sample(key: jax.Array) -> Tree:
        a, b, c = jax.random.split(key, 3)
        return {
            "image": jax.random.normal(a, (batch, *shape)),
            "noise": jax.random.normal(b, (batch, *shape)),
            "time": jax.random.uniform(c, (batch,)),
            "label": jax.random.randint(c, (batch,), 0, 10),
        }

    return sample


class _Residual(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        y = nn.Conv(self.features, (3, 3), dtype=BF16)(nn.silu(nn.GroupNorm(8, dtype=BF16)(x)))
        y = y + nn.Dense(self.features, dtype=BF16)(nn.silu(t))[:, None, None]
        y = nn.Conv(self.features, (3, 3), dtype=BF16)(nn.silu(nn.GroupNorm(8, dtype=BF16)(y)))
        return y + (x if x.shape == y.shape else nn.Conv(self.features, (1, 1), dtype=BF16)(x))


class _Denoiser(nn.Module):
    width: int
    levels: tuple[int, ...]
    attended: int

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        t = nn.Dense(4 * self.width)(nn.silu(nn.Dense(4 * self.width)(_times(1000 * t, self.width))))
        x = nn.Conv(self.width, (3, 3), dtype=BF16)(x)
        kept = [x]

        def attend(y: jax.Array) -> jax.Array:
            flat = nn.GroupNorm(8, dtype=BF16)(y).reshape(y.shape[0], -1, y.shape[-1])
            return y + nn.SelfAttention(4, dtype=BF16)(flat).reshape(y.shape)

        for number, level in enumerate(self.levels):
            for _ in range(2):
                x = _Residual(self.width * level)(x, t)
                x = attend(x) if x.shape[1] <= self.attended else x
                kept.append(x)
            if number + 1 < len(self.levels):
                x = nn.Conv(self.width * level, (3, 3), (2, 2), dtype=BF16)(x)
                kept.append(x)
        x = _Residual(x.shape[-1])(attend(_Residual(x.shape[-1])(x, t)), t)
        for number, level in reversed(list(enumerate(self.levels))):
            for _ in range(3):
                x = _Residual(self.width * level)(jnp.concatenate([x, kept.pop()], -1), t)
                x = attend(x) if x.shape[1] <= self.attended else x
            if number:
                b, h, w, c = x.shape
                x = nn.Conv(c, (3, 3), dtype=BF16)(jax.image.resize(x, (b, 2 * h, 2 * w, c), "nearest"))
        return nn.Conv(3, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))


@stranger(
    {"batch": 8, "side": 8, "width": 16, "levels": (1, 2), "attended": 4},
    batch=32,
    side=64,
    width=128,
    levels=(1, 2, 3, 4),
    attended=16,
)
def diffusion_unet(batch: int, side: int, width: int, levels: tuple[int, ...], attended: int) -> Program:
    """DDPM's U-Net on 64 × 64 images, with a moving average of the weights beside the state."""
    model, tx = _Denoiser(width, levels, attended), optax.adam(2e-4)

    def init(key: jax.Array) -> Tree:
        params = model.init(key, jnp.zeros((1, side, side, 3)), jnp.zeros(1))
        return {"params": params, "average": jax.tree.map(jnp.copy, params), "optimizer": tx.init(params)}

    def loss(params: Tree, batch: Tree) -> jax.Array:
        signal = jnp.cos(batch["time"] * math.pi / 2)[:, None, None, None]
        mixed = signal * batch["image"] + jnp.sqrt(1 - signal**2) * batch["noise"]
        return ((model.apply(params, mixed, batch["time"]) - batch["noise"]) ** 2).mean()

    @partial(jax.jit, donate_argnums=0)
    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        updates, moments = tx.update(gradients, state["optimizer"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["average"], 1e-4)
        return {"params": params, "average": average, "optimizer": moments}, value

    return Program(init, _noised(batch, side, side, 3), step)


class _DiT(nn.Module):
    depth: int
    dim: int
    heads: int
    patch: int

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array, label: jax.Array) -> jax.Array:
        side, channels = x.shape[1], x.shape[-1]
        x = nn.Conv(self.dim, (self.patch,) * 2, (self.patch,) * 2, dtype=BF16)(x)
        grid = x.shape[1]
        x = x.reshape(x.shape[0], -1, self.dim)
        x = x + self.param("places", nn.initializers.normal(0.02), x.shape[1:]).astype(BF16)
        c = nn.Dense(self.dim, dtype=BF16)(nn.silu(nn.Dense(self.dim, dtype=BF16)(_times(1000 * t, 256))))
        c = nn.silu(c + nn.Embed(11, self.dim, dtype=BF16)(label))
        for _ in range(self.depth):
            parts = jnp.split(nn.Dense(6 * self.dim, dtype=BF16)(c)[:, None], 6, -1)
            y = nn.LayerNorm(use_scale=False, use_bias=False, dtype=BF16)(x) * (1 + parts[0]) + parts[1]
            x = x + parts[2] * nn.SelfAttention(self.heads, dtype=BF16)(y)
            y = nn.LayerNorm(use_scale=False, use_bias=False, dtype=BF16)(x) * (1 + parts[3]) + parts[4]
            x = x + parts[5] * nn.Dense(self.dim, dtype=BF16)(nn.gelu(nn.Dense(4 * self.dim, dtype=BF16)(y)))
        x = nn.Dense(self.patch**2 * channels, dtype=BF16)(nn.LayerNorm(dtype=BF16)(x))
        x = x.reshape(-1, grid, grid, self.patch, self.patch, channels)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, side, side, channels)


@stranger({"batch": 8, "side": 8, "depth": 1, "dim": 64, "heads": 4}, batch=32, side=32, depth=12, dim=1024, heads=16)
def diffusion_transformer(batch: int, side: int, depth: int, dim: int, heads: int) -> Program:
    """DiT with adaptive normalisation on latents, trained to match a flow."""
    model = _DiT(depth, dim, heads, 2)

    def init(key: jax.Array) -> Tree:
        return model.init(key, jnp.zeros((1, side, side, 4)), jnp.zeros(1), jnp.zeros(1, int))

    def loss(params: Tree, batch: Tree) -> jax.Array:
        t = batch["time"][:, None, None, None]
        mixed = (1 - t) * batch["image"] + t * batch["noise"]
        flow = model.apply(params, mixed, batch["time"], batch["label"]).astype(jnp.float32)
        return ((flow - (batch["noise"] - batch["image"])) ** 2).mean()

    return trained(init, loss, _noised(batch, side, side, 4))


class _Generator(nn.Module):
    width: int
    doublings: int

    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        x = nn.Dense(16 * self.width * 2**self.doublings)(z).reshape(z.shape[0], 4, 4, -1)
        for level in reversed(range(self.doublings)):
            x = nn.relu(nn.BatchNorm(use_running_average=False, use_fast_variance=False)(x))
            x = nn.ConvTranspose(self.width * 2**level, (4, 4), (2, 2))(x)
        return jnp.tanh(nn.Conv(3, (3, 3))(nn.relu(x)))


class _Critic(nn.Module):
    width: int
    doublings: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for level in range(self.doublings):
            x = nn.leaky_relu(nn.Conv(self.width * 2**level, (4, 4), (2, 2))(x), 0.2)
        return nn.Dense(1)(x.reshape(x.shape[0], -1))


@stranger({"batch": 8, "width": 8, "doublings": 2}, batch=256, width=64, doublings=4)
def wasserstein_gan(batch: int, width: int, doublings: int) -> Program:
    """A generator and a critic with a penalty on its gradient: the gradient of a gradient; two optimizers."""
    generator, critic, tx = _Generator(width, doublings), _Critic(width, doublings), optax.adam(1e-4, 0.5)
    side = 4 * 2**doublings

    def init(key: jax.Array) -> Tree:
        g, d = generator.init(key, jnp.zeros((1, 128))), critic.init(key, jnp.zeros((1, side, side, 3)))
        return {"g": g, "d": d, "tx_g": tx.init(g), "tx_d": tx.init(d)}

    def sample(key: jax.Array) -> Tree:
        a, b, c = jax.random.split(key, 3)
        return {
            "image": jax.random.normal(a, (batch, side, side, 3)),
            "z": jax.random.normal(b, (batch, 128)),
            "mix": jax.random.uniform(c, (batch, 1, 1, 1)),
        }

    def drawn(g: Tree, z: jax.Array) -> jax.Array:
        return generator.apply(g, z, mutable=["batch_stats"])[0]

    def critic_loss(d: Tree, g: Tree, batch: Tree) -> jax.Array:
        fake, real = jax.lax.stop_gradient(drawn(g, batch["z"])), batch["image"]
        between = batch["mix"] * real + (1 - batch["mix"]) * fake
        slope = jax.grad(lambda x: critic.apply(d, x).sum())(between)
        norm = jnp.sqrt((slope**2).sum((1, 2, 3)) + 1e-12)
        return critic.apply(d, fake).mean() - critic.apply(d, real).mean() + 10 * ((norm - 1) ** 2).mean()

    @partial(jax.jit, donate_argnums=0)
    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        value, slopes = jax.value_and_grad(critic_loss)(state["d"], state["g"], batch)
        updates, tx_d = tx.update(slopes, state["tx_d"])
        d = optax.apply_updates(state["d"], updates)
        slopes = jax.grad(lambda g: -critic.apply(d, drawn(g, batch["z"])).mean())(state["g"])
        updates, tx_g = tx.update(slopes, state["tx_g"])
        return {"g": optax.apply_updates(state["g"], updates), "d": d, "tx_g": tx_g, "tx_d": tx_d}, value

    return Program(init, sample, step)


@stranger({"batch": 8, "side": 16, "width": 8, "codes": 16}, batch=32, side=128, width=64, codes=1024)
def vector_quantised(batch: int, side: int, width: int, codes: int) -> Program:
    """VQ-VAE: nearest codes by distances and argmin, a look-up, gradients straight through."""

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for level in (1, 2):
                x = nn.relu(nn.Conv(width * level, (4, 4), (2, 2))(x))
            return nn.Conv(width, (1, 1))(x + nn.Conv(2 * width, (1, 1))(nn.relu(nn.Conv(width, (3, 3))(x))))

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, z: jax.Array) -> jax.Array:
            for level in (2, 1):
                z = nn.relu(nn.ConvTranspose(width * level, (4, 4), (2, 2))(z))
            return nn.Conv(3, (3, 3))(z)

    encoder, decoder = Encoder(), Decoder()

    def init(key: jax.Array) -> Tree:
        return {
            "encoder": encoder.init(key, jnp.zeros((1, side, side, 3))),
            "decoder": decoder.init(key, jnp.zeros((1, side // 4, side // 4, width))),
            "codes": jax.random.normal(key, (codes, width)) / codes,
        }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        z = encoder.apply(params["encoder"], batch["image"])
        flat = z.reshape(-1, width)
        distance = (flat**2).sum(1)[:, None] - 2 * flat @ params["codes"].T + (params["codes"] ** 2).sum(1)
        nearest = params["codes"][jnp.argmin(distance, 1)].reshape(z.shape)
        through = z + jax.lax.stop_gradient(nearest - z)
        drawn = decoder.apply(params["decoder"], through)
        commit = ((jax.lax.stop_gradient(nearest) - z) ** 2).mean()
        return (
            ((drawn - batch["image"]) ** 2).mean() + 0.25 * commit + ((nearest - jax.lax.stop_gradient(z)) ** 2).mean()
        )

    return trained(init, loss, lambda key: {"image": jax.random.normal(key, (batch, side, side, 3))}, optax.adam(3e-4))


@stranger({"batch": 16, "dim": 8, "width": 32, "depth": 2}, batch=16384, dim=64, width=1024, depth=8)
def coupling_flow(batch: int, dim: int, width: int, depth: int) -> Program:
    """RealNVP on vectors: permutations, scales and shifts by small networks, a likelihood."""

    def init(key: jax.Array) -> Tree:
        ks = iter(jax.random.split(key, 3 * depth))
        normal = lambda *shape: jax.random.normal(next(ks), shape) / math.sqrt(shape[0])
        return [(normal(dim // 2, width), normal(width, width), 0.01 * normal(width, dim)) for _ in range(depth)]

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x, volume = batch["x"], 0.0
        for number, (a, b, c) in enumerate(params):
            order = jax.random.permutation(jax.random.key(number), dim)
            fixed, moved = jnp.split(x[:, order], 2, -1)
            scale, shift = jnp.split(jnp.tanh(jnp.tanh(fixed @ a) @ b) @ c, 2, -1)
            scale = jnp.tanh(scale)
            x, volume = jnp.concatenate([fixed, moved * jnp.exp(scale) + shift], -1), volume + scale.sum(-1)
        return (0.5 * (x**2).sum(-1) - volume).mean()

    return trained(init, loss, lambda key: {"x": jax.random.normal(key, (batch, dim))})


@stranger({"rays": 16, "samples": 8, "width": 32, "depth": 2}, rays=4096, samples=128, width=256, depth=6)
def radiance_field(rays: int, samples: int, width: int, depth: int) -> Program:
    """NeRF: sines of positions, a small network at every sample, light gathered along rays by `cumprod`."""

    def encode(x: jax.Array, octaves: int) -> jax.Array:
        angles = x[..., None, :] * 2.0 ** jnp.arange(octaves)[:, None]
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).reshape(*x.shape[:-1], -1)

    def init(key: jax.Array) -> Tree:
        ks, sizes = jax.random.split(key, depth + 1), [60, *[width] * depth, 4]
        return [
            {"w": jax.random.normal(k, (m, n)) * math.sqrt(2 / m), "b": jnp.zeros(n)}
            for k, m, n in zip(ks, sizes[:-1], sizes[1:], strict=True)
        ]

    def loss(params: Tree, batch: Tree) -> jax.Array:
        depths = jnp.linspace(2.0, 6.0, samples)
        points = batch["origin"][:, None] + depths[:, None] * batch["direction"][:, None]
        x = encode(points, 10)
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        x = x @ params[-1]["w"] + params[-1]["b"]
        opaque = 1 - jnp.exp(-jax.nn.softplus(x[..., 3]) * (4.0 / samples))
        light = jnp.cumprod(jnp.concatenate([jnp.ones((rays, 1)), 1 - opaque[:, :-1] + 1e-10], 1), 1)
        colour = ((light * opaque)[..., None] * jax.nn.sigmoid(x[..., :3])).sum(1)
        return ((colour - batch["colour"]) ** 2).mean()

    def sample(key: jax.Array) -> Tree:
        a, b, c = jax.random.split(key, 3)
        return {
            "origin": jax.random.normal(a, (rays, 3)),
            "direction": jax.random.normal(b, (rays, 3)),
            "colour": jax.random.uniform(c, (rays, 3)),
        }

    return trained(init, loss, sample, optax.adam(optax.exponential_decay(5e-4, 1000, 0.1)))
