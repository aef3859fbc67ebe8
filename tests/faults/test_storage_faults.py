"""Storage that fails for a moment ends a run with the code that is started again; damage in it is left out only if asked for, and told."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from small_run import events, finish, make_workspace, metrics, start

from maxlm.base.errors import ExitCode, UnavailableError, UserError
from maxlm.data import manifest, storage
from maxlm.run import open_data
from maxlm.telemetry.phases import Phases


class Data:
    """A config of which only the data section is asked, and it prepares nothing."""

    class data:  # noqa: N801
        prepare = None


@pytest.mark.parametrize(
    ("error", "code"), [(UnavailableError("no answer"), ExitCode.UNAVAILABLE), (UserError("no store"), ExitCode.WRONG_INPUT)]
)
def test_a_store_out_of_reach_has_another_code_than_one_that_is_not_there(monkeypatch, error, code):
    def fails(_config):
        raise error

    monkeypatch.setattr(open_data, "open_data", fails)
    with pytest.raises(UserError, match=str(error)) as caught:
        open_data.open_data_on_all_hosts(Data(), Phases(Console()))
    assert caught.value.exit_code == code


def test_on_several_hosts_a_store_in_a_bucket_is_found(monkeypatch):
    """TensorStore's memory:// stands in for gs://. One that is not there is refused, and one out of reach may come back."""
    monkeypatch.setattr(open_data.jax, "process_count", lambda: 2)

    def prepare(store):
        open_data._prepare(SimpleNamespace(store=store), progress=False)

    for absent in ("memory://bucket/several", None):
        with pytest.raises(UserError, match=f"data.store = {absent} is not prepared: on several hosts run") as caught:
            prepare(absent)
        assert caught.value.exit_code == ExitCode.WRONG_INPUT
    storage.write_bytes("memory://bucket/several", manifest.MANIFEST, b"{}")
    prepare("memory://bucket/several")
    monkeypatch.setattr(storage, "open_folder", lambda folder: (_ for _ in ()).throw(ValueError("UNAVAILABLE: no answer")))
    with pytest.raises(UnavailableError, match="no answer"):
        prepare("memory://bucket/several")


@pytest.mark.soak
def test_a_run_without_a_damaged_chunk_is_the_same_on_another_mesh_and_says_what_it_left_out(tmp_path):
    make_workspace(tmp_path)
    finish(start(tmp_path, "train.steps=5"))
    shard: Path = tmp_path / "store/train/tokens/c/0"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 4
    shard.write_bytes(bytes(content))
    said = finish(start(tmp_path, "run.name=stops"), ExitCode.WRONG_INPUT)
    assert "data.skip_bad_chunks" in said
    for devices in (1, 2):
        said = finish(start(tmp_path, f"run.name=on{devices}", "data.skip_bad_chunks.at_most=5", devices=devices))
        assert "were omitted" in said
    one, two = ([(record["step"], record["batch_digest"]) for record in metrics(tmp_path, f"on{devices}")] for devices in (1, 2))
    assert one == two
    left_out = [[(event["samples"], event["tokens"]) for event in events(tmp_path, "alarm", f"on{devices}")] for devices in (1, 2)]
    assert left_out[0] == left_out[1] != []
