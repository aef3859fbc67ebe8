"""Copies of the state in host memory: bit for bit on any layout, never a damaged or a foreign one, and never more than two."""

import fcntl
import logging
import os
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import IDENTITY, bits, layout, make_state

from maxlm.checkpoint import CheckpointError, Checkpoints, host_copies
from maxlm.config.errors import ConfigError
from maxlm.config.schema import CheckpointConfig, MemoryCheckpointsConfig


def state_of(step: int, shape: tuple[int, int] = (4, 2), width: int = 32):
    state = make_state(step, width)
    del state["key"]
    return layout(*shape)({**state, "step": jnp.int32(step)})


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "memory"


def opened(tmp_path: Path, name: str = "checkpoints", identity: dict[str, str] | None = None, **config) -> Checkpoints:
    """The checkpoints of a run as a process that starts finds them."""
    checkpoints = Checkpoints(tmp_path / name, CheckpointConfig(), identity or IDENTITY)
    checkpoints.add_memory(MemoryCheckpointsConfig(folder=str(tmp_path / "memory"), **{"every_steps": 1, **config}))
    return checkpoints


def copy(checkpoints: Checkpoints, *steps: int) -> None:
    """Copies of these steps, as of a process that dies then."""
    for step in steps:
        checkpoints.memory.save(step, state_of(step), {"next_step": step})
    checkpoints.memory.close(remove=False)


def names(folder: Path) -> list[str]:
    """What is in the folder of the one run."""
    (user,) = folder.iterdir()
    (run,) = user.iterdir()
    return sorted(entry.name for entry in run.iterdir())


def data_of(folder: Path, step: int) -> Path:
    (found,) = folder.glob(f"*/*/{step}-0/data")
    return found


@pytest.mark.parametrize("shape", [(4, 2), (8, 1), (2, 2), (1, 1)])
def test_a_copy_is_restored_bit_for_bit_on_any_mesh_though_the_state_is_donated(tmp_path, shape):
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    checkpoints, state = opened(tmp_path), state_of(3, width=4096)
    expected = {}
    for number in (3, 4, 5):
        expected[number] = bits(state)
        checkpoints.memory.save(number, state, {"next_step": number, "health": {"best": 1.25}})
        state = step(state)
    checkpoints.memory.close(remove=False)
    again = opened(tmp_path)
    wanted = state_of(9, shape, width=4096)
    assert again.latest() == 5
    restored = again.restore(wanted)
    assert (restored.step, restored.source, restored.data_position) == (5, "memory", {"next_step": 5, "health": {"best": 1.25}})
    assert bits(restored.state) == expected[5]
    assert jax.tree.all(jax.tree.map(lambda leaf, like: leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim), restored.state, wanted))
