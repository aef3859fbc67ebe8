"""Small rooms: no file, no function and no config grows until nobody can hold it in mind."""

import ast
from typing import get_args

import pytest
from pydantic import BaseModel
from source_files import ROOT, SOURCES

from maxlm.config.schema import Config

FILE_LINES, KERNEL_LINES, FUNCTION_LINES, SETTINGS = 700, 1000, 80, 150


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_and_its_functions_are_small(path):
    text = path.read_text(encoding="utf-8")
    limit = KERNEL_LINES if path.is_relative_to(ROOT / "kernels") else FILE_LINES
    assert len(text.splitlines()) <= limit
    assert {name: lines for name, lines in function_lengths(text).items() if lines > FUNCTION_LINES} == {}


def function_lengths(text: str) -> dict[str, int]:
    """Lines of every function, decorators and what it defines inside included."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: node.end_lineno - min([node.lineno, *(d.lineno for d in node.decorator_list)]) + 1 for node in functions}


def test_lengths_are_counted():
    assert function_lengths("@x\n@y\ndef f():\n    def g():\n        pass\n    return g\n") == {"f": 6, "g": 2}


def settings(section: type[BaseModel], seen: frozenset[type] = frozenset()) -> int:
    """Settings of a section and of every section in it, each kind of a section counted, each class once along a path."""
    assert section not in seen, "a section that holds itself has no end"
    return sum(
        sum(settings(inner, seen | {section}) for inner in sections) if (sections := sections_in(info.annotation)) else 1
        for info in section.model_fields.values()
    )


def sections_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in sections_in(inner)]


def test_the_whole_config_fits_in_a_head():
    counted = settings(Config)
    assert 80 < counted < SETTINGS


def test_settings_are_counted_through_unions_and_lists():
    class Inner(BaseModel):
        a: int
        b: int

    class Outer(BaseModel):
        c: int
        one: Inner
        some: tuple[Inner, ...] = ()
        perhaps: Inner | None = None

    assert settings(Outer) == 7
