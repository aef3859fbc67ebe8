"""Compilations become events: one for the start, and an alarm for each recompilation of the training step."""

import jax
import jax.numpy as jnp
import pytest

from maxlm.telemetry.compilations import Compilations, because
from maxlm.telemetry.formatting import sentence

COMPILE = "/jax/core/compile/backend_compile_duration"


def reported(name, seconds=0.1, cache=None):
    """As jax reports the compilation of a program."""
    if cache is not None:
        jax.monitoring.record_event(f"/jax/compilation_cache/cache_{cache}")
    jax.monitoring.record_event_duration_secs(COMPILE, seconds, fun_name=f"jit({name})")


def test_jax_reports_what_it_compiles():
    """The names and keys of jax.monitoring are as we expect them, in this version of jax."""

    def train_step(x):
        return jnp.sin(x) @ x

    with Compilations() as compilations:
        for size in (3, 5):
            jax.jit(train_step).lower(jax.ShapeDtypeStruct((size, size), jnp.float32)).compile()
            found = compilations.take(size)
            assert [event.kind for event in found] == ["compile", "alarm"][: len(found)]
            assert found[0].data["longest"][0]["name"] == "train_step"
            assert min(found[0].data[part] for part in ("trace_s", "lower_s", "compile_s")) > 0
    assert found[1].data["cause"] == "recompilation"
    assert "compiled again" in sentence(found[1])


@pytest.mark.parametrize("reason", ["batches of 4 sequences", ""])
def test_only_what_is_compiled_after_the_first_update_is_compiled_again(reason):
    with Compilations() as compilations:
        reported("train_step")
        reported("train_step")
        assert [event.kind for event in compilations.take(1)] == ["compile"]
        assert compilations.take(2) == []
        with because(reason):
            reported("train_step", 4.2)
        event, alarm = compilations.take(3)
    assert event.data["programs"] == 1
    assert alarm.step == 3
    assert alarm.data["reason"].startswith("the training step was compiled again, in 4.2 s: ")
    assert alarm.data["reason"].endswith(reason or "have changed")


def test_hits_and_misses_of_the_cache_are_counted():
    with Compilations() as compilations:
        reported("loaded", 0.1, "hits")
        reported("compiled", 2.0, "misses")
        reported("without_cache", 0.2)
        (event,) = compilations.take(1)
    assert (event.data["programs"], event.data["cache_hits"], event.data["cache_misses"]) == (3, 1, 1)
    longest = {program["name"]: program["cached"] for program in event.data["longest"]}
    assert longest == {"compiled": False, "without_cache": None, "loaded": True}
    assert sentence(event) == "Compiled by step 1: 3 programs, 1 of them from the cache, in 2.3 s; longest: compiled, 2 s"


def test_small_programs_of_other_parts_make_no_event():
    """They are counted in the next one."""
    with Compilations() as compilations:
        reported("train_step")
        compilations.take(1)
        reported("small", 0.1)
        assert compilations.take(2) == []
        reported("large", 0.6)
        assert [event.data["programs"] for event in compilations.take(3)] == [2]


def test_nothing_is_heard_outside():
    with Compilations() as compilations:
        pass
    reported("train_step")
    assert compilations.take(1) == []
