"""States are made some leaves at a time."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlm.memory.pieces import create
from maxlm.memory.spaces import on_host


def test_a_leaf_of_the_host_is_kept_before_the_next_is_made(monkeypatch):
    """So that host memory never holds a state that goes into a file."""
    monkeypatch.setattr("maxlm.memory.pieces.GROUP_BYTES", 1)
    events: list[str] = []

    def make(first):
        events.append("made")
        return {"a": jnp.arange(4) + first, "b": jnp.ones(3), "c": jnp.zeros(2)}

    device = NamedSharding(Mesh(jax.devices()[:1], ("data",)), PartitionSpec())

    def keep(path, leaf):
        events.append(path[0].key)
        return f"{path[0].key} of {leaf.size}"

    kept = create(make, {"a": device, "b": on_host(device), "c": on_host(device)}, 5, keep=keep)
    assert kept == {"a": "a of 4", "b": "b of 3", "c": "c of 2"}
    assert events == ["made", "made", "a", "made", "b", "made", "c"]  # the first only for shapes
