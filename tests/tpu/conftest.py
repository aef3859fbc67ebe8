"""Programs for chips that are not here cannot be read back from jax's cache of compiled programs."""

import jax
import pytest


@pytest.fixture(autouse=True)
def no_compilation_cache():
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)
