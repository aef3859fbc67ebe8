"""Configuration of jax before it touches a device."""

import os

import jax
import pytest

from maxlm.hardware.chips import GPU_MEMORY_SHARE
from maxlm.runtime.jax_setup import enable_compilation_cache, select_platform

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
    select_platform()
    assert {name: os.environ[name] for name in (OLD, NEW) if name in os.environ} == then


def test_programs_of_several_cpu_devices_are_not_kept(monkeypatch, tmp_path):
    """Loaded again they forget the order of their collectives, and a run may stop for ever."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    try:
        assert enable_compilation_cache() is None
        assert jax.config.jax_compilation_cache_dir is None
        monkeypatch.setattr(jax, "device_count", lambda: 1)
        assert enable_compilation_cache() == jax.config.jax_compilation_cache_dir == str(tmp_path)
    finally:
        monkeypatch.undo()
        enable_compilation_cache()
