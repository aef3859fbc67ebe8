"""Small shards, so that tiny stores have many of them."""

import pytest

from maxlm.data import metadata, storage
from maxlm.data.storage import ArrayLayout


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "TOKENS", ArrayLayout(chunk=16, shard=64))
    monkeypatch.setattr(storage, "DOCUMENTS", ArrayLayout(chunk=4, shard=16))
    monkeypatch.setattr(metadata, "ROWS", 16)
