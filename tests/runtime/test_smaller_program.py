"""A step that was compiled ahead for fewer hosts is loaded where it is whole and the right one, and computes the same."""

import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from tiny import tiny_config

from maxlm.runtime import smaller_program
from maxlm.runtime.smaller_program import compile_ahead, keep, load
from maxlm.telemetry.compilations import AHEAD, STEP, Compilations, Compiled


@pytest.fixture
def kept(tmp_path):
    """(path, compiled): a small program for the second of all devices, on disk."""
    device = jax.devices()[1]
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    compiled = jax.jit(lambda x: jnp.tanh(x @ x)).lower(shape).compile()
    keep(compiled, tmp_path / "ahead" / "a.bin")
    return tmp_path / "ahead" / "a.bin", compiled


def test_a_kept_program_computes_the_same_bits(kept):
    path, compiled = kept
    x = jax.device_put(jax.random.normal(jax.random.key(0), (8, 8)), jax.devices()[1])
    loaded = load(path, [jax.devices()[1]])
    assert (loaded(x) == compiled(x)).all()
    assert loaded.memory_analysis() is not None


def test_a_damaged_or_exchanged_one_is_not_used(kept):
    path, _ = kept
    data = path.read_bytes()
    other = path.with_name("b.bin")
    other.write_bytes(data)
    assert load(other, [jax.devices()[1]]) is None, "an entry is bound to its name"
    for damaged in (b"", data[:31], data[:-1], data[:100] + bytes([data[100] ^ 1]) + data[101:]):
        path.write_bytes(damaged)
        assert load(path, [jax.devices()[1]]) is None
    assert load(path.with_name("none.bin"), [jax.devices()[1]]) is None


def test_its_name_has_all_that_it_depends_on(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    config = tiny_config()
    names = {smaller_program._path(config, 1), smaller_program._path(config, 2), smaller_program._path(tiny_config(train={"seed": 3}), 1)}
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=5")
    names.add(smaller_program._path(config, 1))
    assert len(names) == 3, "the number of virtual devices changes nothing"
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--a=b")
    names.add(smaller_program._path(config, 1))
    assert len(names) == 4
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket")
    assert smaller_program._path(config, 1) is None


@pytest.mark.parametrize("ahead", [True, False])
def test_it_is_compiled_for_one_host_less_where_that_is_asked(monkeypatch, tmp_path, ahead):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    made = []
    monkeypatch.setattr(smaller_program.Program, "compiled", lambda program: made.append(program) or 1 / 0)
    config = tiny_config(mesh={"data": 2}, elastic={"min_hosts": 1, "compile_ahead": ahead})
    here = SimpleNamespace(quorum=SimpleNamespace(together=1, fits=lambda left: True), absent=(), configured=2)
    thread = compile_ahead(config, here)
    assert (thread is not None) == ahead
    if thread is not None:
        thread.join(20)
        assert [(program.mesh.size, program.config.train.microbatches) for program in made] == [(1, 2)], "and its failure ends nothing"
    assert compile_ahead(config, SimpleNamespace(**{**vars(here), "absent": ("host1",)})) is None


@pytest.mark.parametrize(("reason", "alarms"), [(AHEAD, []), ("", ["recompilation"])])
def test_compiling_ahead_raises_no_alarm(reason, alarms):
    compilations = Compilations()
    compilations.take(1)
    compilations._programs = [Compiled(STEP, 30.0, None, reason)]
    assert [event.data["cause"] for event in compilations.take(2) if event.kind == "alarm"] == alarms
