"""The generated pages are as the source is, and name every command, event, exit code and environment variable."""

import ast
import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import typer
from source_files import ROOT, SOURCES, nodes_of

from maxlm.base.errors import ExitCode
from maxlm.cli import app
from maxlm.command_examples import EXAMPLES, commands_of
from maxlm.reference import pages
from maxlm.reference.environment import VARIABLES
from maxlm.telemetry.event_fields import FIELDS
from maxlm.telemetry.observer import EventKind

FOLDER = ROOT / "docs" / "reference"


@cache
def generated() -> dict[str, str]:
    return pages.generated()


def containing(*texts: str) -> list[Path]:
    """Files of the package with one of these texts."""
    files = [path for path in SOURCES if path.is_relative_to(ROOT / "maxlm")]
    return [path for path in files if any(text in path.read_text(encoding="utf-8") for text in texts)]


def test_pages_are_as_the_source_is():
    """Else: `python -m maxlm.reference`, and delete files that it no longer writes."""
    changed = [name for name, text in generated().items() if (FOLDER / name).read_text(encoding="utf-8") != text]
    assert changed == []
    assert {path.name for path in (FOLDER / "settings").iterdir()} == {Path(name).name for name in generated() if "/" in name}


def test_pages_that_differ_are_written(tmp_path):
    assert len(pages.write(tmp_path)) == len(generated())
    (tmp_path / "events.md").write_text("old")
    assert pages.write(tmp_path) == [tmp_path / "events.md"]


def test_every_command_has_examples_that_its_parser_takes():
    commands = dict(commands_of(app))
    assert set(commands) == set(EXAMPLES)
    group = typer.main.get_command(app)  # one object a process (tests/conftest.py): a command keeps the help option of its first context
    outer = group.make_context("maxlm", ["path"])
    for example in (example for examples in EXAMPLES.values() for example in examples):
        program, *words = shlex.split(example.partition(" > ")[0])
        assert program == "maxlm"
        command, arguments = group, words
        while hasattr(command, "commands"):
            command, arguments = command.commands[arguments[0]], arguments[1:]
        inner = command.make_context(command.name, list(arguments), parent=outer)
        assert "-h" in command.get_help_option(inner).opts


def test_configs_of_examples_exist():
    words = [word for examples in EXAMPLES.values() for one in examples for word in one.split()]
    named = {word for word in words if re.match(r"(models|ladders)/|runs/\w+-v", word)}
    assert len(named) >= 3
    made = {"models/imported"}
    assert [name for name in named - made if not (ROOT / "configs" / f"{name}.yml").is_file()] == []


def test_help_ends_with_the_examples(capsys):
    with pytest.raises(SystemExit):
        app(["config", "--help"])
    assert "maxlm config --explain mesh.fsdp" in capsys.readouterr().out


def test_every_kind_of_event_has_its_fields():
    assert set(get_args(EventKind)) == set(FIELDS)
    texts = [text for about, fields in FIELDS.values() for text in (about, *fields.values())]
    assert [text for text in texts if not text.endswith(".") or len(text.split()) < 2] == []


def test_fields_of_events_are_those_that_are_written():
    """Events that the source makes of a literal kind and literal fields."""
    seen = 0
    unknown = []
    for path in containing("Event("):
        for node in nodes_of(path):
            match node:
                case ast.Call(func=ast.Name(id="Event"), args=[ast.Constant(value=str(kind)), *_], keywords=words):
                    for data in (word.value for word in words if word.arg == "data" and isinstance(word.value, ast.Dict)):
                        names = [key.value for key in data.keys if isinstance(key, ast.Constant)]
                        seen += len(names)
                        unknown += [f"{path.name}: {kind}.{name}" for name in names if name not in FIELDS[kind].fields]
    assert seen > 20
    assert unknown == []


def test_every_exit_code_is_described():
    rows = re.findall(r"^\| (\d) \| `\w+` \| (.{20,}\.) \|$", generated()["exit-codes.md"], re.MULTILINE)
    assert [int(code) for code, _ in rows] == [code.value for code in ExitCode]


def test_declared_metrics_are_found():
    found = {metric.name for metric, _ in pages.declared_metrics()}
    assert found >= {
        "loss",
        "margin",
        "dropped",
        "layer_ratio",
        "layer_activation",
        "noise_scale",
        "loss_scale",
        "joules_per_token",
        "loss_ahead",
    }


def test_environment_variables_are_listed():
    """Each that maxlm or a script of it names by a literal; of launchers those that stand for a group."""
    listed = {name for variables in VARIABLES.values() for name in variables}
    literals = set()
    for path in containing("MAXLM_", "environ.get("):
        for node in nodes_of(path):
            match node:
                case ast.Constant(value=str(text)) if re.fullmatch(r"MAXLM_[A-Z_]+", text):
                    literals.add(text)
                case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="environ"), attr="get"), args=[ast.Constant(value=name), *_]):
                    literals.add(name)
    scripts = [*(ROOT / "gcp").glob("*"), *(ROOT / "slurm").glob("*")]
    literals |= {name for path in scripts if path.is_file() for name in re.findall(r"\bMAXLM_[A-Z_]+\b", path.read_text(encoding="utf-8"))}
    assert len(literals) > 10
    assert sorted(literals - listed - {"PYTHONPATH"}) == []


def test_schemas_are_shipped():
    schema = json.loads((FOLDER / "maxlm.schema.json").read_text(encoding="utf-8"))
    assert schema["$defs"]["MeshConfig"]["properties"]["fsdp"]["description"].startswith("Shards of the weights")


def test_every_setting_is_on_a_page():
    texts = [text for name, text in generated().items() if name.startswith("settings/")]
    rows = [line for text in texts for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 450
    assert [row for row in rows if row.endswith("|  |") or row.count(" | ") < 3] == []
