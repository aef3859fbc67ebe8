"""Names that could leave the folder, and folders that cannot be written, are refused before anything is written."""

import errno
import json

import pytest

from maxlm.base.errors import ConfigError
from maxlm.config import load
from maxlm.telemetry import run_dir
from maxlm.telemetry.run_dir import RunDirectory

BAD_NAMES = ["", ".", "..", "../x", "a/b", "/abs", "a\\b", "a..b", ".hidden", "a\0b", "a\nb", "a\x1b[31m", " a", "a ", "x" * 256, "\udc80"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_are_refused_in_one_line_and_write_nothing(tmp_path, name):
    with pytest.raises(ConfigError) as caught:
        RunDirectory.create(tmp_path / "runs", name)
    assert caught.value.field == "run.name"
    assert "\n" not in str(caught.value)
    assert "\0" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["quickstart", "llama-8b.2", "A_1", "日本", "a b"])
def test_good_names_make_the_folder(tmp_path, name):
    run = RunDirectory.create(tmp_path / "runs", name)
    assert run.path.is_dir()
    assert list(run.path.iterdir()) == []  # the probe is gone
    assert RunDirectory.create(tmp_path / "runs", name) == run  # again, for a restart


def test_paths_lie_inside(tmp_path):
    run = RunDirectory.create(tmp_path, "r")
    inside = [run.config, run.metrics, run.routing, run.events, run.log, run.report, run.tensorboard, run.checkpoints]
    names = ["config.yml", "metrics.jsonl", "routing.jsonl", "events.jsonl", "log.txt", "report.html", "tensorboard", "checkpoints"]
    assert inside == [tmp_path / "r" / name for name in names]


def test_only_the_primary_process_writes(tmp_path):
    run = RunDirectory.create(tmp_path / "runs", "r", primary=False)
    run.write_config("a: 1\n")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError):
        RunDirectory.create(tmp_path, "..", primary=False)


def test_the_config_is_replaced_whole(tmp_path, monkeypatch):
    run = RunDirectory.create(tmp_path, "r")
    run.write_config("a: 1\n")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        run.write_config("a: 2\n")
    assert run.config.read_text() == "a: 1\n"
    assert list(run.path.iterdir()) == [run.config]


@pytest.mark.parametrize("where", ["dir", "name"])
def test_a_file_in_the_way(tmp_path, where):
    (tmp_path / "taken").write_text("precious")
    with pytest.raises(ConfigError, match="is a file") as caught:
        RunDirectory.create(tmp_path / "taken", "r") if where == "dir" else RunDirectory.create(tmp_path, "taken")
    assert caught.value.field == "run.dir"
    assert (tmp_path / "taken").read_text() == "precious"


def test_an_unwritable_place():
    with pytest.raises(ConfigError) as caught:
        RunDirectory.create("/proc/no/such", "r")
    assert caught.value.field == "run.dir"


@pytest.mark.parametrize("dir", ["", "a\0b", "gs://bucket/runs"])
def test_what_is_no_folder(dir):
    """A config cannot name it."""
    with pytest.raises(ConfigError) as caught:
        load("runs/quickstart", [f"run.dir={json.dumps(dir)}"])
    assert caught.value.field == "run.dir"


@pytest.mark.parametrize(("code", "says"), [(errno.ENOSPC, "full disk"), (errno.EROFS, "Read-only"), (errno.EACCES, "Permission")])
def test_a_disk_that_takes_no_write_is_told_and_left_as_it_was(tmp_path, monkeypatch, code, says):
    def refuse(path):
        raise OSError(code, {errno.EROFS: "Read-only file system", errno.EACCES: "Permission denied"}.get(code, "No space"), str(path))

    monkeypatch.setattr(run_dir, "_probe", refuse)
    with pytest.raises(ConfigError, match=says) as caught:
        RunDirectory.create(tmp_path / "a" / "b", "r")
    assert caught.value.field == "run.dir"
    assert list(tmp_path.iterdir()) == []
