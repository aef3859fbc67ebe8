"""What jax is told before it touches a device."""

import os

import pytest

from maxlm.hardware.chips import GPU_MEMORY_SHARE
from maxlm.runtime.jax_setup import look_for_devices

OLD, NEW = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"


@pytest.mark.parametrize(
    ("own", "then"),
    [({}, {NEW: str(GPU_MEMORY_SHARE)}), ({NEW: "0.5"}, {NEW: "0.5"}), ({OLD: "0.5"}, {OLD: "0.5"})],
    ids=["none", "new", "old"],
)
def test_jax_takes_what_planning_counts_on_unless_told_otherwise(monkeypatch, own, then):
    for name in (OLD, NEW):
        monkeypatch.setenv(name, "")  # so that what the call sets is undone afterwards
        monkeypatch.delenv(name)
    for name, share in own.items():
        monkeypatch.setenv(name, share)
    look_for_devices()
    assert {name: os.environ[name] for name in (OLD, NEW) if name in os.environ} == then
