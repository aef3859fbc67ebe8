"""Programs for chips that are not here cannot be read back from jax's cache of compiled programs, and jax warns of it."""

import warnings

import pytest


@pytest.fixture(autouse=True)
def no_warning_of_the_cache():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache")
        yield
