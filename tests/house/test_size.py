"""Small rooms: no file, no function and no config grows until nobody can hold it in mind."""

import ast
from collections.abc import Iterable
from typing import get_args

from pydantic import BaseModel
from source_files import ROOT, SOURCES, nodes_of

from maxlm.config.schema import Config

FILE_LINES, KERNEL_LINES, FUNCTION_LINES, SETTINGS = 700, 1000, 80, 20
CORE = {
    "ModelConfig": 20,
    "DataConfig": 6,
    "TrainConfig": 9,
    "OptimizerConfig": 13,
    "MeshConfig": 10,
    "MemoryConfig": 3,
    "PrecisionConfig": 2,
    "CheckpointConfig": 4,
    "RunConfig": 4,
}


def test_files_and_their_functions_are_small():
    long_files, long_functions = {}, {}
    for path in SOURCES:
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        limit = KERNEL_LINES if path.is_relative_to(ROOT / "kernels") else FILE_LINES
        if (lines := len(text.splitlines())) > limit:
            long_files[name] = lines
        long_functions |= {
            (name, function): lines for function, lines in function_lengths(nodes_of(path)).items() if lines > FUNCTION_LINES
        }
    assert long_files == {} and long_functions == {}


def function_lengths(nodes: Iterable[ast.AST]) -> dict[str, int]:
    """Lines of every function, decorators and what it defines inside included."""
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: node.end_lineno - min([node.lineno, *(d.lineno for d in node.decorator_list)]) + 1 for node in functions}


def test_lengths_are_counted():
    source = "@x\n@y\ndef f():\n    def g():\n        pass\n    return g\n"
    assert function_lengths(ast.walk(ast.parse(source))) == {"f": 6, "g": 2}


def sections_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in sections_in(inner)]


def plain(section: type[BaseModel]) -> int:
    """Settings of a section itself: optional capabilities are sections of their own."""
    return sum(not sections_in(info.annotation) for info in section.model_fields.values())


def all_sections(section: type[BaseModel]) -> set[type[BaseModel]]:
    inner = {found for info in section.model_fields.values() for found in sections_in(info.annotation)}
    return {section}.union(*(all_sections(found) for found in inner))


def test_no_section_holds_more_than_a_reader_can():
    found = {section.__name__: plain(section) for section in all_sections(Config)}
    assert len(found) > 20
    assert {name: count for name, count in found.items() if count > SETTINGS} == {}


def test_core_sections_do_not_grow():
    """A new setting of theirs takes the place of another, or is an optional section."""
    found = {section.__name__: plain(section) for section in all_sections(Config)}
    assert {name: found[name] for name in CORE if found[name] > CORE[name]} == {}


def test_settings_are_counted_through_unions_and_lists():
    class Inner(BaseModel):
        a: int
        b: int

    class Outer(BaseModel):
        c: int
        d: int | None = None
        one: Inner
        some: tuple[Inner, ...] = ()
        perhaps: Inner | None = None

    assert (plain(Outer), all_sections(Outer)) == (2, {Outer, Inner})
