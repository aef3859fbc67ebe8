"""The public names, their signatures and their types are those of surface.txt: a change is made on purpose, and the changelog tells it.

After such a change: python tests/api/test_surface.py > tests/api/surface.txt
"""

import ast
import dataclasses
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import maxlm

ROOT = Path(__file__).resolve().parents[2]
FROZEN = Path(__file__).with_name("surface.txt")


def surface() -> list[str]:
    """A line for each name, and for each public member of a class of the API, as the source has it."""
    lines = []
    for name in sorted(maxlm.__all__):
        found = getattr(maxlm, name)
        if inspect.isclass(found):
            lines += [f"class {name}", *(f"    {line}" for line in members(found))]
        else:
            lines.append(f"def {name}{signature(found)}" if callable(found) else name)
    return lines


def members(owner: type) -> Iterator[str]:
    """Fields, and of a class of the API, or an interface, its properties and methods."""
    if dataclasses.is_dataclass(owner) or hasattr(owner, "_fields"):
        names = owner._fields if hasattr(owner, "_fields") else [field.name for field in dataclasses.fields(owner)]
        yield from (name for name in names if not name.startswith("_"))
    if not owner.__module__.startswith("maxlm.api.") and not getattr(owner, "_is_protocol", False):
        return
    for name, member in vars(owner).items():
        if name.startswith("_") and name not in ("__getitem__", "__iter__", "__len__"):
            continue
        function = getattr(member, "__func__", None) or getattr(member, "fget", None) or getattr(member, "func", None) or member
        if inspect.isfunction(function):
            yield (
                f"{name}{signature(function)}"
                if callable(member) or hasattr(member, "__func__")
                else f"{name}{signature(function)} (property)"
            )


def signature(function: Callable) -> str:
    node = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    assert isinstance(node, ast.FunctionDef)
    return f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"


def test_the_surface_is_frozen():
    assert surface() == FROZEN.read_text(encoding="utf-8").splitlines()


def test_every_public_name_is_documented():
    """In a docstring, for `help`, and on the page of the API."""
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    names = [name for name in maxlm.__all__ if name != "__version__"]
    assert [name for name in names if not inspect.getdoc(getattr(maxlm, name))] == []
    assert [name for name in names if f"maxlm.{name}" not in page] == []


def test_types_are_those_of_the_names():
    """The stub, which type checkers read, imports what `__getattr__` imports."""
    tree = ast.parse((ROOT / "maxlm" / "__init__.pyi").read_text(encoding="utf-8"))
    stated = {f"{node.module}:{alias.name}" for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert stated == set(maxlm._API.values()) and (ROOT / "maxlm" / "py.typed").is_file()


def test_import_and_configs_need_no_jax():
    used = 'maxlm.load_config("runs/quickstart"); maxlm.UserError; maxlm.Config; maxlm.StepRecord'
    code = f"import sys, maxlm; {used}; print([name for name in ('jax', 'numpy', 'flax') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


if __name__ == "__main__":
    print("\n".join(surface()))
