"""A small state like that of a training run, on any layout of the eight devices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxlm.checkpoint import Checkpoints
from maxlm.config.schema import CheckpointConfig

IDENTITY = {"model.d_model": "16", "model.n_layers": "2", "tokenizer": "abc", "optimizer.name": "adamw"}


def layout(fsdp: int, tensor: int) -> Callable[[Any], Any]:
    """A function that puts a tree on a mesh: matrices split over both axes, the rest replicated."""
    mesh = jax.make_mesh((fsdp, tensor), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: fsdp * tensor])

    def put(leaf: jax.Array) -> jax.Array:
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec("fsdp", "tensor") if leaf.ndim == 2 else PartitionSpec()))

    return lambda tree: jax.tree.map(put, tree)


def make_state(seed: int = 0, width: int = 32) -> dict[str, Any]:
    """Parameters in two dtypes, AdamW's state, a step and a random key: every leaf random, so that a mix-up shows."""
    keys = iter(jax.random.split(jax.random.key(seed), 64))
    params = {
        "embed": jnp.zeros((64, width), jnp.bfloat16),
        "layers": {"w": jnp.zeros((16, width)), "bias": jnp.zeros((width,))},
    }
    state = {"params": params, "opt_state": optax.adamw(1e-3).init(params), "step": jnp.int32(0)}
    random = jax.tree.map(lambda leaf: (jax.random.normal(next(keys), leaf.shape) * 1000).astype(leaf.dtype), state)
    return {**random, "key": jax.random.key(seed)}


def bits(tree: Any) -> list[bytes]:
    """The bytes of every leaf: equal lists mean bitwise equal trees."""
    leaves = [jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf for leaf in jax.tree.leaves(tree)]
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def open_store(directory: Path | str, identity: dict[str, str] | None = None, **config: int) -> Checkpoints:
    """The checkpoints in a directory, by default of the experiment `IDENTITY`."""
    return Checkpoints(directory, CheckpointConfig(**config), IDENTITY if identity is None else identity)
