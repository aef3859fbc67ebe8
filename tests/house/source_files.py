"""Where the product's own source is."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path for folder in ("maxlm", "kernels", "tools") for path in (ROOT / folder).rglob("*.py") if path.is_relative_to(path.resolve().parent)
)


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's syntax tree, of which the first is the tree: parsed once for all tests."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
