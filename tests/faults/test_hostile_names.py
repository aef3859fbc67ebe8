"""Names, paths and metadata from outside change nothing of the files, pages, commands and lines that they are written into."""

import io
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from ruamel.yaml import YAML
from safetensors.numpy import save_file
from small_run import CONFIG
from typer.testing import CliRunner

from maxlm.base.console import Console
from maxlm.base.errors import UserError, quoted, shell_command
from maxlm.cli import app
from maxlm.config import load, show
from maxlm.interop.exporting import export_model
from maxlm.interop.importing import import_model
from maxlm.telemetry import report
from maxlm.telemetry.report.charts import json_block

GOLDEN = Path(__file__).resolve().parents[1] / "interop" / "golden" / "llama2.npz"
NAMES = {
    "line": "a\nalerts: {command: [touch, x]}",
    "quotes": "a'b\"c",
    "substitution": "$(touch x)`touch x`${HOME}",
    "script": "<script>alert(1)<!--",
    "escape": "\x1b]0;owned\x07\x1b[2J\x9b31m",
    "direction": "a\u202egpj.exe\u2066",
    "option": "-rf --out=x",
    "comment": "# x: y",
    "template": "{{ 7 * 7 }}{% x %}",
    "markup": "[/bold][link=x]:smile:",
    "picture": "![x](javascript:alert)|x|",
    "separators": "a\u2028b\u0085c\rd",
}


@pytest.fixture(params=NAMES.values(), ids=NAMES)
def name(request):
    return request.param


def test_no_name_ends_a_line_or_moves_the_cursor(name):
    """On a console, as a line and in a table's cell, and in an error."""
    from rich.table import Table

    table = Table("one", name)
    table.add_row(name, "x")
    for shown in (f"{name}: done", table):
        written = io.StringIO()
        Console(file=written, force_terminal=False, width=400).print(shown)
        text = written.getvalue()
        assert all(char.isprintable() or char == "\n" for char in text), text
        assert "[/bold]" not in name or "[/bold][link=x]:smile:" in text
    assert str(UserError(f"{name} is wrong")).isprintable() and quoted(name).isprintable()


def test_maxlm_config_shows_one_line_a_setting(tmp_path, name):
    """Also where the file, and a setting, has the name."""
    file = tmp_path / f"{name.replace('/', '')}.yml"
    file.write_text(CONFIG)
    loaded = load(str(file), [f"run.dir={json.dumps(name)}"])
    text = show.as_text(lambda model, seq_len, tokens: {}, loaded)
    assert all(char.isprintable() or char == "\n" for char in text), text
    assert all(re.match(r"[a-z_.0-9]+ ", line) for line in text.splitlines()), text


def test_maxlm_report_prints_one_line(monkeypatch, name):
    monkeypatch.setattr(report, "write_report", lambda folders, place: place)
    said = CliRunner().invoke(app, ["report", name, "--out", f"{name}.html"]) if not name.startswith("-") else None
    assert said is None or said.output.removesuffix("\n").isprintable()


def test_a_command_that_is_shown_is_one_line_that_a_shell_reads_back(name):
    shown = shell_command("printf", "%s", name)
    assert shown.isprintable()
    assert subprocess.run(["bash", "-c", shown], capture_output=True, check=True).stdout == os.fsencode(name)


def test_every_console_of_the_product_is_that_console():
    root = Path(__file__).resolve().parents[2] / "maxlm"
    raw = re.compile(r"rich.console import .*\bConsole\b")
    assert [str(file.relative_to(root)) for file in root.rglob("*.py") if raw.search(file.read_text())] == ["base/console.py"]


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)


def test_no_name_ends_json_in_a_page(name):
    page = Elements()
    page.feed(f"<p>{json_block([name], 'x')}</p>")
    assert page.found == ["p", "script"]


@pytest.mark.parametrize("name", [one if one in ("line", "picture") else pytest.param(one, marks=pytest.mark.soak) for one in NAMES])
def test_no_name_of_a_folder_becomes_a_setting_or_a_part_of_a_card(name, tmp_path):
    """`import` and `export`: model.yml holds one section, whatever the folder is called; the card has no element, link or picture."""

    def nothing(done: int, total: int) -> None: ...

    source = tmp_path / NAMES[name].replace("/", "_")
    source.mkdir()
    with np.load(GOLDEN) as recorded:
        (source / "config.json").write_text(str(recorded["config"]))
        save_file({key[5:]: recorded[key] for key in recorded.files if key.startswith("grad ")}, source / "model.safetensors")
    import_model(source, tmp_path / "new", [], nothing)
    assert list(YAML(typ="safe", pure=True).load((tmp_path / "new" / "model.yml").read_text())) == ["model"]
    shutil.copytree(tmp_path / "new", tmp_path / "named" / source.name)
    export_model(tmp_path / "named" / source.name, tmp_path / "out", "float32", "5GB", None, nothing)
    card = (tmp_path / "out" / "README.md").read_text()
    page = Elements()
    page.feed(re.sub(r"`[^`\n]*`", "", card))
    assert page.found == [] and not re.search(r"\[[^\]\n]*\]\(", re.sub(r"`[^`\n]*`", "", card))
    assert all(char.isprintable() or char == "\n" for char in card)
    assert len(card.splitlines()) == len(card.split("\n")) - card.endswith("\n")
