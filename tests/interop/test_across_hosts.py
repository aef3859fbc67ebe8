"""An import by two processes: the same checkpoint as by one; and what one of them cannot do, none does."""

import json
import subprocess
from pathlib import Path

import fork_server
import jax
import numpy as np
import pytest
from golden_hf import drawn
from safetensors.numpy import save_file
from small_run import command, environment, free_port

from maxlm.checkpoint import Checkpoints
from maxlm.cluster import agree
from maxlm.config import UserError, load
from maxlm.interop.importing import import_model
from maxlm.models import abstract_model_state, abstract_parameters


def nothing(done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    recorded = np.load(Path(__file__).parent / "golden" / "mixtral.npz")
    (folder / "config.json").write_text(str(recorded["config"]))
    names = [key.removeprefix("grad ") for key in recorded.files if key.startswith("grad ")]
    save_file({key: drawn(key, recorded[f"grad {key}"].shape) for key in names}, folder / "model.safetensors")
    return folder


def together(folder: Path, *sources: Path) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of an import by as many processes as there are sources, with two devices each."""
    cluster = (f"coordinator=localhost:{free_port()}", f"process_count={len(sources)}")
    joined = [
        fork_server.Popen(
            command("import", str(place), "--out", "out", "mesh.fsdp=2", "mesh.expert=2", *cluster, f"process_id={number}"),
            cwd=folder,
            env=environment(2),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number, place in enumerate(sources)
    ]
    outputs = [process.communicate(timeout=180) for process in joined]
    return [(process.returncode, *output) for process, output in zip(joined, outputs, strict=True)]


def restored(folder: Path):
    config = load(str(folder / "config.yml")).config
    wanted = {"params": abstract_parameters(config.model), "model_state": abstract_model_state(config.model)}
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), wanted)
    return Checkpoints(folder / "checkpoints", config.checkpoint, {}).restore_entries(wanted).state


def test_two_processes_write_what_one_does(source, tmp_path):
    ends = together(tmp_path, source, source)
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "parameters (model.yml, checkpoints/, tokenizer/)" in ends[0][1] and "parameters" not in ends[1][1], "one of them says it"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    import_model(source, tmp_path / "alone", [], nothing)
    assert (tmp_path / "out" / "model.yml").read_text() == (tmp_path / "alone" / "model.yml").read_text()
    jax.tree.map(np.testing.assert_array_equal, restored(tmp_path / "out"), restored(tmp_path / "alone"))


def test_a_folder_that_one_host_lacks_ends_all(source, tmp_path):
    ends = together(tmp_path, source, tmp_path / "elsewhere")
    assert [code for code, _, _ in ends] == [2, 2], ends
    assert all("elsewhere does not exist" in error for _, _, error in ends)
    assert list(tmp_path.iterdir()) == []


def test_what_one_of_two_cannot_read_is_left_by_both(source, tmp_path, monkeypatch):
    """By the agreement alone: a source of other tensors, and a number that is not finite in a tensor that the other does not read."""
    seen = {}

    def require_equal(facts, problem=None):
        seen.update(facts)
        if problem is None and "source" in facts:
            raise UserError("host1: source is another")

    monkeypatch.setattr(agree, "require_equal", require_equal)
    with pytest.raises(UserError, match="source is another"):
        import_model(source, tmp_path / "out", [], nothing)
    changed = tmp_path / "changed"
    changed.mkdir()
    values = json.loads((source / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps({**values, "rope_theta": 5.0}))
    (changed / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    first = seen["source"]
    with pytest.raises(UserError):
        import_model(changed, tmp_path / "out", [], nothing)
    assert seen["source"] != first
    assert [path.name for path in tmp_path.iterdir()] == ["changed"]
