"""Every door that opens a path given by a user refuses pipes, devices, sockets, folders and huge files in one line, and waits for none."""

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from attack_files import make_store
from safetensors.numpy import save_file

from maxlm import cli
from maxlm.base import atomic

GOLDEN = Path(__file__).resolve().parents[1] / "interop" / "golden" / "llama2.npz"
SECONDS = 200  # a door that waits for a pipe never ends


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/null")  # and not /dev/zero, which a broken door would read until memory is full


def listening(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**42)


KINDS: dict[str, Callable[[Path], None]] = {
    "a named pipe": pipe,
    "a device": device,
    "a socket": listening,
    "a folder": Path.mkdir,
    "huge": huge,
}

# A door is the command line with {} for the path, and what is at the path in a folder of a good model.
RUN = ["runs/quickstart"]
PLAN = ["plan", *RUN, "--topology", "v5p:2x2x1"]
PREPARE = ["data", "prepare", *RUN, "data.store=new"]
DOORS: dict[str, list[str]] = {
    "train config": ["train", "{}"],
    "config config": ["config", "{}"],
    "config diff": ["config", *RUN, "--diff", "{}"],
    "compile config": ["compile", "{}"],
    "plan config": ["plan", "{}"],
    "plan prices": [*PLAN, "--prices", "{}"],
    "plan ladder": ["plan", *RUN, "--flops", "1e15", "--ladder", "{}"],
    "plan calibration": [*PLAN, "--calibration", "{}"],
    "ladder file": ["ladder", "{}"],
    "generate run_dir": ["generate", "{}", "hello"],
    "generate prompts_file": ["generate", "model", "--prompts", "{}"],
    "import source": ["import", "{}", "--out", "new"],
    "import config": ["import", "model", "--out", "new", "--config", "{}"],
    "export run_dir": ["export", "{}", "--out", "new"],
    "eval model": ["eval", "{}", "--tasks", "task.yml"],
    "eval tasks": ["eval", "model", "--tasks", "{}"],
    "average run_dir": ["average", "{}", "--out", "new"],
    "report run_dirs": ["report", "{}"],
    "runs places": ["runs", "{}"],
    "query places": ["query", "select 1", "{}"],
    "profile run_dir": ["profile", "{}"],
    "data prepare config": ["data", "prepare", "{}"],
    "data inspect place": ["data", "inspect", "{}"],
    "corpus run file": ["corpus", "run", "{}"],
    "corpus report output": ["corpus", "report", "{}"],
}
INSIDE: dict[str, list[str]] = {  # paths that a setting names, and files of a folder that is named
    "config extends": ["config", "extends.yml"],
    "prepare sources": [*PREPARE, "data.prepare.sources=[{}]"],
    "prepare tokenizer": [*PREPARE, "data.prepare.tokenizer.path={}"],
    "prepare template": [
        *PREPARE,
        "data.prepare.tokenizer.path=model/tokenizer.json",
        "data.prepare.conversations={{kind: chat, template: {}}}",
    ],
    "train calibration": ["compile", *RUN, "cost.calibration={}"],
    "ladder result": ["plan", *RUN, "--flops", "1e15", "--ladder", "folder:ladder.json"],
    "corpus report": ["corpus", "report", "folder:report.json"],
    "corpus list": ["corpus", "run", "corpus.yml", "stages=[{{kind: bad_words, words: {}}}]"],
    "import config.json": ["import", "model:config.json", "--out", "new"],
    "import weights": ["import", "model:model.safetensors", "--out", "new"],
    "import index": ["import", "model:model.safetensors.index.json", "--out", "new"],
    "import tokenizer": ["import", "model:tokenizer.json", "--out", "new"],
    "import settings": ["import", "model:tokenizer_config.json", "--out", "new"],
    "import generation": ["import", "model:generation_config.json", "--out", "new"],
    "run config": ["train", "folder:config.yml"],
    "store manifest": ["data", "inspect", "store:store.json"],
    "store tokenizer": ["data", "inspect", "store:tokenizer.json"],
    "store template": ["data", "inspect", "store:chat_template.jinja"],
    "store array": ["data", "inspect", "store:train/tokens/zarr.json"],
    "store shards": ["data", "inspect", "store:train/tokens.shards"],
    "store digests": ["data", "inspect", "store:train/tokens/digests/0"],
}
# Parameters that name no file which is read: outputs, settings, numbers and names.
WRITTEN = {"out", "hlo_out"}
OTHER = {"overrides", "topology", "buy", "region", "compare", "prompts", "stop", "weights", "dtype", "shard_size", "quantize", "steps"}
OTHER |= {"command", "arguments", "operation", "smallest", "largest", "name", "place of doctor", "text_field", "chip", "shape"}
OTHER |= {"explain", "sql", "columns", "sort", "where"}
STREAMED = {"prepare sources"}  # of any size


def parameters() -> set[str]:
    """`COMMAND PARAMETER` of all that take a text or a path, from the parser."""
    found = set()

    def walk(command, name):
        for below, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{name} {below}".strip())
        for one in [] if hasattr(command, "commands") else command.params:
            kind = str(one.type_descriptor.annotation)
            if "str" in kind or "Path" in kind:
                found.add(f"{name} {one.name}")

    walk(typer.main.get_command(cli.app), "")
    return found


def test_every_path_of_the_command_line_is_tried_here():
    """A new parameter that takes a text is either a door, or said to be none."""

    def is_other(one):
        command, _, name = one.rpartition(" ")
        return bool({name, f"{name} of {command}"} & (WRITTEN | OTHER))

    assert {one for one in parameters() if not is_other(one)} == set(DOORS)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A Hugging Face folder that is imported, with zeros for weights, but for the tokenizer."""
    folder = tmp_path_factory.mktemp("good") / "model"
    folder.mkdir()
    with np.load(GOLDEN) as recorded:
        (folder / "config.json").write_text(str(recorded["config"]))
        save_file({key[5:]: recorded[key] for key in recorded.files if key.startswith("grad ")}, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text("{}")
    make_store(folder.parent / "store", 0)
    return folder


@pytest.fixture
def workspace(model, tmp_path, monkeypatch) -> Path:
    shutil.copytree(model, tmp_path / "model")
    shutil.copytree(model.parent / "store", tmp_path / "store")
    (tmp_path / "folder").mkdir()
    (tmp_path / "task.yml").write_text("{name: t, kind: perplexity, text: no.txt}")
    (tmp_path / "extends.yml").write_text("extends: [at]\n")
    (tmp_path / "corpus.yml").write_text(json.dumps({"output": "out", "sources": {"a": {"paths": ["task.yml"]}}}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hung(*_):
    raise TimeoutError("it waits for what is no file")


@pytest.mark.parametrize("kind", ["a named pipe", *(pytest.param(kind, marks=pytest.mark.soak) for kind in list(KINDS)[1:])])
@pytest.mark.parametrize("door", [*DOORS, *INSIDE])
def test_what_is_no_file_is_refused_in_one_line(workspace, capsys, monkeypatch, door, kind):
    if kind == "huge" and door in STREAMED:
        pytest.skip("texts may be of any size, and are never read whole")
    line = (DOORS | INSIDE)[door]
    named = next((word for word in line if word.startswith(("model:", "folder:", "store:"))), None)
    place = workspace / (named.replace(":", "/") if named else "at.yml")
    if place.exists():
        place.unlink()
    KINDS[kind](place)
    arguments = [word.partition(":")[0] if word == named else word.format(place) if "{}" in word else word for word in line]
    monkeypatch.setattr("sys.argv", ["maxlm", *arguments])
    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(SECONDS)
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    out, err = capsys.readouterr()
    last = err.rstrip("\n").rpartition("\n")[2]
    assert ended.value.code == 2, f"{out}{err}"
    assert last.startswith("maxlm: ") and last.isprintable() and "Traceback" not in out + err, err


@pytest.mark.parametrize("kind", list(KINDS)[:4])
def test_what_is_no_file_is_not_replaced(tmp_path, kind):
    """`report --out /dev/null`, as root, would leave a regular file in its place."""
    KINDS[kind](tmp_path / "at")
    before = (tmp_path / "at").lstat()
    with pytest.raises(IsADirectoryError, match=f"it is {kind}, and not a regular file"):
        atomic.write_text(tmp_path / "at", "report")
    assert (tmp_path / "at").lstat() == before and len(list(tmp_path.iterdir())) == 1
