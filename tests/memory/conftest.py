"""Small pieces, so that the arrays of tiny models are cut."""

import pytest

from maxlm.memory import pieces


@pytest.fixture
def cut(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
