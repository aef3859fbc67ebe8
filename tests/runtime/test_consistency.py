"""Training refuses devices other than those of the config's `cluster` section."""

from types import SimpleNamespace

import numpy as np
import pytest
from tiny import tiny_config

from maxlm.config import UserError
from maxlm.config.schema import ClusterConfig
from maxlm.runtime import consistency, host_allgather
from maxlm.runtime.consistency import check_devices, require_same


def config(topology: str | None, slices: int = 1):
    plain = tiny_config(mesh={"fsdp": 8})
    mesh = plain.mesh.model_copy(update={"slices": slices})
    cluster = None if topology is None else ClusterConfig(topology=topology)
    return plain.model_copy(update={"cluster": cluster, "mesh": mesh})


def devices(kind: str, count: int):
    return [SimpleNamespace(device_kind=kind)] * count


def test_the_machine_that_is_promised_is_taken():
    check_devices(config("v5p:2x2x1"), devices("TPU v5", 4))
    check_devices(config("v5p:2x2x1", slices=2), devices("TPU v5", 8))
    check_devices(config("tpu7x:2x2x1"), devices("TPU7x", 8))
    check_devices(config("h200:1x8"), devices("NVIDIA H200", 8))
    check_devices(config(None), devices("cpu", 1))


@pytest.mark.parametrize(("kind", "count"), [("cpu", 1), ("cpu", 4), ("TPU v5", 8), ("TPU v6 lite", 4), ("NVIDIA H100 80GB HBM3", 4)])
def test_another_machine_is_refused(kind, count):
    with pytest.raises(UserError, match=rf"v5p:2x2x1 is 4 x TPU v5, and this run has {count} x {kind}: .*cluster=null") as told:
        check_devices(config("v5p:2x2x1"), devices(kind, count))
    assert told.value.exit_code == 2


def test_what_one_host_cannot_find_is_told_to_all(monkeypatch):
    """Also in the host that has found it: both are told why before either waits for the other."""

    def two_hosts(text):
        return [text.split("\n"), ["other", "False", "models/x holds no config.yml", ""]]

    monkeypatch.setattr(consistency.jax, "process_count", lambda: 2)
    monkeypatch.setattr(consistency, "allgather_lines", two_hosts)
    with pytest.raises(UserError, match=r"other.*: models/x holds no config\.yml"):
        require_same("train.start_from", lambda: "1234")
    monkeypatch.setattr(consistency, "allgather_lines", lambda text: [text.split("\n"), ["other", "False", "", "5678"]])
    with pytest.raises(UserError, match=r"train\.start_from is "):
        require_same("train.start_from", lambda: "1234")


def test_what_this_host_cannot_find_is_raised():
    def fail():
        raise UserError("no such folder")

    with pytest.raises(UserError, match="no such folder"):
        require_same("train.start_from", fail)


def test_any_number_of_facts_is_compared(monkeypatch):
    """The last one too, of a hundred tasks."""
    facts = {f"task {number}": f"{number:012x}" for number in range(100)}
    other = "\n".join(["other", "False", "", *list(facts.values())[:-1], "f" * 12])
    monkeypatch.setattr(consistency.jax, "process_count", lambda: 2)
    monkeypatch.setattr(host_allgather, "allgather", lambda values: np.stack([values, encoded(other, values)]))
    with pytest.raises(UserError, match="task 99 is ffffffffffff"):
        consistency.require_equal(facts)


def encoded(text, like):
    """`text`, or its length, as the other process sends it beside `like`."""
    if like.dtype == np.int32:
        return np.array([len(text)], np.int32)
    return np.frombuffer(text.encode()[: like.size].ljust(like.size, b"\0"), np.uint8)
