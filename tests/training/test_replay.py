"""The replay of an update names the first tensor that is not finite and its layer: in nested scans, under remat, on a mesh."""

import math

import jax
import jax.numpy as jnp
import pytest
from tiny import first_state, tiny_batch, tiny_program

from maxlm.training.evidence import Replay

MODEL = {"n_layers": 7, "layer_pattern": ["local", "local", "global"], "window": 16}  # two periods, and one layer more
UP, QUERY, DOWN = ("layers", "0", "mlp", "up_DF"), ("layers", "1", "attention", "query_DHK"), ("tail", "0", "mlp", "down_FD")


@pytest.fixture(scope="module")
def replay():
    return Replay(tiny_program(4, mesh={"fsdp": 2, "tensor": 2}, model=MODEL))


def named(replay, *path, at=(), value=3e38, batch=None):
    """What the replay says where the entries `at` of a parameter are `value`."""
    program = replay._program
    state = first_state(program)
    tree, batch = state.params, batch or tiny_batch(0)
    for key in path[:-1]:
        tree = tree[key]
    if path:
        tree[path[-1]] = jax.device_put(tree[path[-1]].at[at].set(value), tree[path[-1]].sharding)
    return replay.first_not_finite(state, jax.device_put(batch, program.batch_sharding), 0)


@pytest.mark.soak
def test_the_first_tensor_and_its_layer_are_named(replay):
    assert named(replay) == ("", None)
    assert named(replay, *UP, at=(1, 1, slice(None), 0)) == ("up", 4)
    assert named(replay, *QUERY, at=(1, slice(None), 0)) == ("query", 5)
    assert named(replay, "output_VD", at=(slice(None), 0)) == ("the loss", None)
    assert named(replay, *DOWN, at=(slice(None), 0), value=math.nan) == ("params.tail.0.mlp.down_FD", None)
    weights = tiny_batch(0).weights_BS.copy()
    weights[3, 4] = math.nan
    assert named(replay, batch=tiny_batch(0)._replace(weights_BS=weights)) == ("batch.weights_BS", None)


@pytest.mark.parametrize("slices", [0, pytest.param(2, marks=pytest.mark.soak), 4])
def test_of_gradients_the_last_layer_is_named(slices):
    """They are computed backwards. Here those of two layers and of the embedding overflow, and nothing else. With compression they come
    stacked, one of each slice, as many as layers or not.
    """
    compressed = {"mesh": {"data": slices, "slices": slices}, "compression": {"kind": "int8"}} if slices else {}
    program = tiny_program(max(slices, 1), model={"n_layers": 4}, **compressed)

    def gradients(params, model_state, batch, denominator):
        _, grads = of_a_slice(params)
        return None, jax.tree.map(lambda grad: jnp.stack([jnp.zeros_like(grad)] * (slices - 1) + [grad]), grads) if slices else grads

    def of_a_slice(params):
        grads = jax.tree.map(jnp.zeros_like, params)
        layers = grads["layers"]["0"]
        layers["mlp"]["gate_DF"] = layers["mlp"]["gate_DF"].at[2, 0, 0].set(jnp.inf)
        layers["attention"]["key_DGK"] = layers["attention"]["key_DGK"].at[1].set(jnp.inf)
        return None, {**grads, "embedding_VD": grads["embedding_VD"] + jnp.nan}

    program.__dict__["gradients"] = gradients
    assert named(Replay(program)) == ("the gradient of layers.0.mlp.gate_DF", 2)
