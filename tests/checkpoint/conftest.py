"""Checkpoints that many tests read."""

from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import layout, make_state, open_store


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """A directory with checkpoints 1, 2 and 3 (not to be changed: copy it), and their states."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    states = {step: layout(4, 2)(make_state(step)) for step in (1, 2, 3)}
    store = open_store(directory)
    for step, state in states.items():
        assert store.save(step, state, {"step": step, "epoch": 0})
    store.close()
    return directory, states
