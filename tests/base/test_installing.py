"""Commands that a message names: for a clone those of the repository, for an installed package those of pip."""

import ast
import importlib.metadata
from pathlib import Path

import pytest

from maxlm.base.installing import GPU_COMPILER, gpu_compiler_command, install_command
from maxlm.config.loader import PACKAGE


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").touch()
    return tmp_path


def test_an_extra_of_a_clone_and_of_an_installed_package(clone, tmp_path):
    assert install_command("tpu", root=clone) == "pip install -e '.[tpu]' in the clone"
    assert install_command("tpu", root=tmp_path / "site-packages") == "pip install 'maxlm[tpu]'"
    assert install_command(root=tmp_path / "site-packages") == "pip install maxlm"


def test_the_compiler_for_gpus_is_installed_where_it_is_looked_for(clone, tmp_path):
    assert gpu_compiler_command(root=clone, prefix=clone / ".venv") == "make gpu-compiler in the clone"
    for root, prefix in ((clone, tmp_path / "other"), (tmp_path / "site-packages", tmp_path)):  # make would fill another environment
        command = gpu_compiler_command(root=root, prefix=prefix)
        assert command.startswith(f"pip install --no-deps --target {prefix / GPU_COMPILER.name} ")
        assert f"jax-cuda13-plugin=={importlib.metadata.version('jaxlib')} " in command and "make" not in command


def test_the_pip_command_installs_the_packages_of_the_makefile(tmp_path):
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition(".venv/gpu-compiler: .venv/installed-test")[2]
    packages = [word.partition("==")[0] for word in gpu_compiler_command(root=tmp_path, prefix=tmp_path).split()[5:]]
    assert len(packages) == 4 and all(package in recipe for package in packages)


def test_no_message_names_an_extra_or_a_make_target_itself():
    """Messages take these commands from `installing`, so that each is right for both ways to install."""
    found = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.name != "installing.py"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if any(words in node.value for words in ("pip install -e '", "pip install 'maxlm", "install: make", "installed: make"))
    ]
    assert not found
