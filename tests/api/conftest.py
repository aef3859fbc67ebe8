"""A run that `maxlm.fit` has trained, shared by the tests of this room."""

import pytest
from api_cases import Recorder, settings

import maxlm


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with texts."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "texts").mkdir()
    for number in range(60):
        words = " ".join(f"{chr(97 + (number * k) % 26)}{'xyz'[(number + k) % 3]}{k % 7}" for k in range(80))
        (folder / "texts" / f"{number:02}.txt").write_text(f"document {number}: {words}\n")
    return folder


@pytest.fixture(scope="session")
def fitted(folder):
    """(result of `fit`, an observer, losses that a function was told)."""
    recorder, losses = Recorder(), []
    config = maxlm.load_config(settings(folder, "fitted"))
    return maxlm.fit(config, callbacks=[recorder, lambda record: losses.append(record.loss)], quiet=True), recorder, losses
