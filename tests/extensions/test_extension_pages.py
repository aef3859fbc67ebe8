"""The page on extensions prints the packages of this folder and names the methods of the interfaces; the Python page lists the names that
extensions may import, and the packages import no others.
"""

import ast
import re
import sys
from importlib import import_module
from pathlib import Path

import jax
import pytest
from tiny import tiny_batch, tiny_config

from maxlm.config import choices, table
from maxlm.config.capability import Capability
from maxlm.config.part import KINDS
from maxlm.models import abstract_parameters
from maxlm.objectives import build_objective

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
GUIDE, PYTHON = ((DOCS / name).read_text(encoding="utf-8") for name in ("how-to/extensions.md", "reference/python.md"))
BLOCKS = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
CLASSES = {
    "objective": "maxlm.objectives:Objective",
    "optimizer": "maxlm.training.update_rule:UpdateRule",
    "residual": "maxlm.models.residual:ResidualRule",
    "metric": "maxlm.objectives:BatchMetric",
    "transforms": "maxlm.training.transform:Transform",
    "readers": "maxlm.training.reader:Reader",
    "observers": "maxlm.telemetry.observer:ConfiguredObserver",
}
PLAIN = {"metrics", "name", "phase"}  # attributes that are declared, and have no value in the class


def rows(text: str, head: str) -> dict[str, list[str]]:
    """Cells of a table by the names in its first column. `head`: begins its first line."""
    lines = text[text.index(f"\n{head}") :].lstrip().partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: rest for first, *rest in cells for name in re.findall(r"`([\w.]+)`", first)}


def named(cell: str) -> set[str]:
    return set(re.findall(r"`(\w+)(?:\([^`]*\))?`", cell)) - {"NextToken"}


@pytest.fixture
def registry(monkeypatch):
    """No parts of other packages before and after the test."""
    monkeypatch.setattr(choices, "registered", [])
    table.clear()
    yield
    monkeypatch.undo()
    table.clear()


@pytest.mark.parametrize("name", ["label_smoothing/maxlm_label_smoothing/loss.py", "tiger/maxlm_tiger/rule.py"])
def test_the_page_prints_the_packages_that_other_tests_train(name):
    for file in (HERE / name, (HERE / name).parent / "__init__.py"):
        assert file.read_text(encoding="utf-8") in BLOCKS, f"print {file.name} of {name} on docs/how-to/extensions.md as it is"


def test_the_metric_of_the_page_works_as_printed(registry, tmp_path, monkeypatch):
    (block,) = [one for one in BLOCKS if "class Surprise(" in one]
    (tmp_path / "printed_metric.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    import_module("printed_metric")
    config = tiny_config(metrics={"surprise": {"above": 3.0}})
    _, sums = jax.eval_shape(build_objective(config).loss, abstract_parameters(config.model), {}, tiny_batch())
    assert "surprising" in sums.added
    del sys.modules["printed_metric"]


def test_tables_name_the_methods_of_the_interfaces():
    kinds, fields = rows(GUIDE, "| kind | made"), rows(GUIDE, "| field |")
    assert set(kinds) == set(KINDS) and all(hasattr(Capability, field) for field in fields)
    for kind, place in CLASSES.items():
        *_, must, may = {**kinds, **fields}[kind]
        interface = choices.load(place)
        assert getattr(interface, "__abstractmethods__", frozenset()) <= named(must), kind
        assert [name for name in named(must) | named(may) if name not in PLAIN and not hasattr(interface, name)] == [], kind
        hooks = {name for name, value in vars(interface).items() if callable(value) and not name.startswith("_")}
        assert hooks - named(must) - named(may) <= {"sums", "declared", "alike"}, f"methods of {kind} that the page does not name"


def test_names_for_extensions_exist_and_are_all_that_the_packages_import():
    listed = {}
    for line in re.findall(r"^\| (`maxlm\.[^|]*)\| ([^|]*)\|$", PYTHON, re.MULTILINE):
        modules, names = (re.findall(r"`([\w.]+)`", cell) for cell in line)
        for name in names:
            assert any(hasattr(import_module(module), name) for module in modules), name
        for module in modules:
            listed[module] = set(names)
    assert len(listed) > 15
    files = [file for file in HERE.rglob("*.py") if "maxlm_" in str(file.parent) or file.name in {"swa.py", "kinds.py"}]
    assert len(files) >= 8
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("maxlm.") and file.name != "family.py":
                assert {one.name for one in node.names} <= listed.get(str(node.module), set()), f"{file.name} imports from {node.module}"
