"""Imports go down only, as pyproject.toml says; and import-linter would notice if one did not."""

import ast
import importlib
import importlib.util
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from source_files import ROOT

LINT = Path(sys.executable).with_name("lint-imports")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """import-linter on the package and the contracts in `folder`."""
    command = [LINT, "--no-cache", "--no-logo"]
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(folder), "COLUMNS": "200"}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The package as it is, with kernels/ in its place rather than linked there."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "maxlm", folder / "maxlm", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_the_contracts_hold():
    answer = lint(ROOT)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "5 kept, 0 broken" in answer.stdout


PLANTED = {  # module -> import that a contract forbids, the contract, and the words that name the import
    "config.rules": ("from maxlm.data import batch", "Imports go down only", "maxlm.config.rules -> maxlm.data.batch"),
    "parallel.mesh": ("def later():\n    import maxlm.training.loop", "Imports go down only", "maxlm.parallel.mesh -> maxlm.training.loop"),
    "data.token_store": ("from maxlm import checkpoint", "Imports go down only", "maxlm.data.token_store -> maxlm.checkpoint"),
    "hardware.chips": ("import jax.numpy", "instant", "maxlm.hardware.chips -> jax"),
    "kernels.attention.xla": ("from maxlm import config", "nothing of maxlm", "maxlm.kernels.attention.xla -> maxlm.config"),
    "config.axes": ("def later():\n    from maxlm.config import rules", "No import cycles", "No cycles are allowed in maxlm.config."),
}


def test_upward_imports_are_noticed(copy):
    for module, (planted, _, _) in PLANTED.items():
        with (copy / "maxlm" / f"{module.replace('.', '/')}.py").open("a", encoding="utf-8") as file:
            file.write(f"\n{planted}\n")
    answer = lint(copy)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    missing = [words for _, contract, named in PLANTED.values() for words in (f"{contract} BROKEN", named) if words not in answer.stdout]
    assert not missing, answer.stdout


def test_every_package_has_a_layer():
    """A package that no layer names would be free to import anything."""
    contracts = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    packages = [path.name for path in (ROOT / "maxlm").iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert [name for name in packages if f"maxlm.{name}" not in contracts] == []


def test_no_two_test_modules_share_a_name():
    """Pytest imports a test module by its bare name, so that the second of two would not be collected."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name not in ("conftest.py", "__init__.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_programs_beside_the_package_import_what_there_is():
    """Scripts of gcp/, slurm/ and tools/, which no type checker and no other test may ever load."""
    missing = []
    for path in sorted(path for folder in ("gcp", "slurm", "tools") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "maxlm":
                missing += [f"{path.name}: {node.module}.{name.name}" for name in node.names if not exists(node.module, name.name)]
    assert missing == []


def exists(module: str, name: str) -> bool:
    """True if `from module import name` works; a package that an extra brings may be missing."""
    try:
        return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None
    except ModuleNotFoundError as error:
        return not (error.name or "").startswith("maxlm")


def test_an_import_of_nothing_is_noticed():
    assert exists("maxlm.config", "load") and exists("maxlm.config", "loader") and not exists("maxlm.config.loader", "nothing")
    assert not exists("maxlm.nothing", "load")
