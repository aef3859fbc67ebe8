"""docs/explanation/reading.md names the whole path of the plain training step, and the path stays short.

Counted are the lines of every function of maxlm that runs while the step is traced forward and backward, and of those that the page names:
docstrings and blank lines inside included; of a class its own lines and those of the methods that run; and of each file its module-level
lines (docstring, imports, tables). Kernels and the schema of settings are not counted.
"""

import ast
import gc
import re
import sys
from pathlib import Path

import jax
import pytest
from source_files import ROOT
from tiny import tiny_program

from maxlm.models.parameters import abstract_decoder
from maxlm.models.stack import layer_groups
from maxlm.training.step import build_train_step

PAGE = ROOT / "docs" / "explanation" / "reading.md"
MAX_FILES, MAX_LINES = 10, 980
LEFT_OUT = ("maxlm/kernels/", "maxlm/config/")  # kernels, settings
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef

Stops = dict[str, set[str]]  # names of functions and classes, by file


def stops() -> Stops:
    """The stops of the page's table."""
    found: Stops = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\| \[[^]]+\]\(\.\./\.\./([^)]+)\) ([^|]*) \|", line):
            found.setdefault(match[1], set()).update(re.findall(r"`([^`]+)`", match[2]))
    return found


@pytest.fixture(scope="module")
def traced() -> dict[str, set[int]]:
    """First lines of the functions that run while the plain step is traced, by file."""
    program = tiny_program(2, mesh={"fsdp": 2})
    step = build_train_step(program.update)
    inputs = program.abstract_state, program.abstract_batch
    abstract_decoder.cache_clear()
    layer_groups.cache_clear()
    found: dict[str, set[int]] = {}

    def profile(frame, event, argument) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{ROOT}/maxlm/"):
            found.setdefault(str(Path(path).relative_to(ROOT)), set()).add(frame.f_code.co_firstlineno)

    gc.collect()  # a generator that an earlier test has left would be closed, and seen, while the step is traced
    before = sys.getprofile()
    with jax.set_mesh(program.mesh):
        sys.setprofile(profile)
        try:
            jax.eval_shape(step, *inputs)
        finally:
            sys.setprofile(before)
    return {path: lines for path, lines in found.items() if not path.startswith(LEFT_OUT)}


def span(node: ast.stmt) -> set[int]:
    return set(range(min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]), node.end_lineno + 1))


def counted(source: str, named: set[str], ran: set[int]) -> set[int]:
    """Lines of a file that are on the path."""
    lines: set[int] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            methods = [method for method in node.body if isinstance(method, FUNCTIONS)]
            read = [m for m in methods if f"{node.name}.{m.name}" in named or span(m) & ran]
            if read or node.name in named:
                lines |= span(node).difference(*map(span, methods)).union(*map(span, read))
        elif not isinstance(node, FUNCTIONS) or node.name in named or span(node) & ran:
            lines |= span(node)
    return lines


def names_in(source: str) -> set[str]:
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, FUNCTIONS | ast.ClassDef):
            found |= {node.name} | {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, FUNCTIONS)}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    return found


def test_every_stop_exists():
    found = stops()
    assert found
    missing = {path: names - names_in((ROOT / path).read_text(encoding="utf-8")) for path, names in found.items()}
    assert {path: names for path, names in missing.items() if names} == {}


def test_every_link_exists():
    links = re.findall(r"\]\(([^)]+)\)", PAGE.read_text(encoding="utf-8"))
    assert [link for link in links if not (PAGE.parent / link).exists()] == []


def test_the_page_names_every_file_that_runs(traced):
    assert set(traced) - set(stops()) == set()


def test_the_path_is_short(traced):
    """All of it, helpers included; the page states its length."""
    path = {
        path: len(counted((ROOT / path).read_text(encoding="utf-8"), names, traced.get(path, set()))) for path, names in stops().items()
    }
    assert len(path) <= MAX_FILES
    assert sum(path.values()) <= MAX_LINES, path
    assert f"The whole path is {sum(path.values())} lines in {len(path)} files" in PAGE.read_text(encoding="utf-8"), path


def test_lines_are_counted():
    methods = "    def f(self):\n        return 1\n\n    def g(self):\n        return 2\n"
    source = f"import a\n\n\nclass A:\n    x = 1\n\n{methods}\n\ndef h():\n    pass\n"
    assert counted(source, set(), set()) == {1}
    assert counted(source, set(), {10}) == {1, 4, 5, 6, 9, 10, 11}
    assert counted(source, {"A", "h"}, set()) == {1, 4, 5, 6, 9, 14, 15}
