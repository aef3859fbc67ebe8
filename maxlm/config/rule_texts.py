"""Texts of the rules about a setting, read from the source of the rules: the refused value, the reason and the fix, with `…` for values.

A rule is a function that yields (field, value, rule, fix). Its yields are found in its syntax tree, and names in them are replaced by what
was assigned to them above. Nothing is run, so that the text of every branch is there.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from maxlm.config.capability import Capability
from maxlm.config.sections.mesh import AXES, LOGICAL_AXES
from maxlm.config.table import RULES, records

_VALUE = "…"  # stands for a value that only a run of the rule would know
Names = Mapping[str, ast.expr]  # name -> expression that was assigned to it


class RuleText(NamedTuple):
    """A problem that a rule may report."""

    capability: str  # key of the record that holds the rule
    field: str  # the setting that is refused, with `…` for a part that varies
    rule: str
    fix: str


def rules_about(key: str) -> list[RuleText]:
    """Texts of the rules that may refuse the setting of a dotted key, or a setting in the section of that key."""
    found = [text for one in records() for text in _texts(one) if _is_about(text, key)]
    return list(dict.fromkeys((*found, *_divisions(key))))


def all_rules() -> list[RuleText]:
    """Texts of all rules of the table, each once."""
    written = (text for one in records() for text in _texts(one) if text.field.strip(_VALUE))
    return list(dict.fromkeys((*written, *(text for axis in AXES for text in _divisions(f"mesh.{axis}")))))


def readers_of(key: str) -> list[str]:
    """Keys of the records of which a rule reads the setting of this dotted key, in addition to the record of its own section."""
    name = key.replace(".", "_")
    reading = (one.key for one in records() if any(name in inspect.signature(rule).parameters for rule in one.functions))
    return [reader for reader in dict.fromkeys(reading) if not f"{key}.".startswith(f"{reader}.")]


def _is_about(text: RuleText, key: str) -> bool:
    within = key == text.capability or key.startswith(f"{text.capability}.")
    if text.field.startswith(_VALUE):  # known only when the rule runs, but for its end
        return within and len(text.field) > 1 and key.endswith(text.field.strip(_VALUE))
    if text.field.endswith(f".{_VALUE}"):  # some setting of a section
        return key == text.field.removesuffix(f".{_VALUE}")
    pattern = re.escape(text.field).replace(f"\\.{_VALUE}\\.", r"\.(\w+\.)?").replace(_VALUE, r"\w+")
    return bool(re.fullmatch(pattern, key))


def _divisions(key: str) -> Iterator[RuleText]:
    """Rules of the table of logical axes: a mesh axis divides the dimensions that it splits."""
    for axis in LOGICAL_AXES.values():
        reason = f" ({axis.reason})" if axis.reason else ""
        for position, mesh_axis in enumerate(axis.mesh):
            others = "".join(f" times mesh.{other}" for other in axis.mesh[:position])
            for field in axis.sizes:
                if key == f"mesh.{mesh_axis}":
                    yield RuleText("mesh", key, f"must divide {field}{f', also{others}' if others else ''}{reason}", "use a divisor")
                if key == field:
                    yield RuleText("mesh", key, f"must be a multiple of mesh.{mesh_axis}{others}{reason}", "change one of them")


@lru_cache
def _texts(one: Capability) -> tuple[RuleText, ...]:
    """Texts of all rules of a record, and of its settings without effect."""
    rules = [rule for kind in RULES for rule in getattr(one, kind)]
    found: list[RuleText] = []
    for rule in (*rules, *((one.inert,) if one.inert is not None else ())):
        if hasattr(rule, "refuses"):
            found += [RuleText(one.key, field, text, rule.fix) for field, text in rule.refuses.items()]
        else:
            found += (RuleText(one.key, *text) for text in _yielded(rule, set()))
    return tuple(dict.fromkeys(found))


def _yielded(function: Callable[..., Any], seen: set[str]) -> Iterator[tuple[str, str, str]]:
    """(field, rule, fix) of every problem in a function, and in functions of its module that it calls."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_qualname in seen:
        return
    seen.add(code.co_qualname)
    globals_ = function.__globals__
    tree = _tree(function)
    if tree is not None:
        yield from _Problems(_constants(globals_)).of(tree.body)
    for name in code.co_names:
        called = globals_.get(name)
        if inspect.isgeneratorfunction(called) and called.__module__ == function.__module__:
            yield from _yielded(called, seen)


def _constants(values: Mapping[str, Any]) -> Names:
    """Texts of a module, and its tuples of texts."""
    texts = {name: ast.Constant(value) for name, value in values.items() if isinstance(value, str)}
    tuples = {name: value for name, value in values.items() if isinstance(value, tuple) and all(isinstance(one, str) for one in value)}
    return {**texts, **{name: ast.Tuple([ast.Constant(one) for one in value]) for name, value in tuples.items()}}


def _tree(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """Syntax tree of a function; None for a lambda, or without source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError, TypeError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


class _Problems:
    """Problems in statements that are read in their order, with the names assigned so far."""

    def __init__(self, names: Names) -> None:
        self._names = dict(names)

    def of(self, body: list[ast.stmt]) -> Iterator[tuple[str, str, str]]:
        """(field, rule, fix) of every problem that the statements yield."""
        for statement in body:
            match statement:
                case ast.Assign(targets=[target], value=value):
                    self._names |= dict(_unpacked(target, value))
                case ast.AugAssign(target=ast.Name(id=name), value=value) if name in self._names:
                    self._names[name] = ast.BinOp(self._names[name], ast.Add(), value)
                case ast.For(target=target, iter=over, body=inner):
                    for names in self._rounds(target, over):
                        yield from _Problems({**self._names, **names}).of(inner)
                case ast.Expr(value=ast.Yield(value=value)) if value is not None:
                    yield from self._problem(value)
                case ast.Expr(value=ast.YieldFrom(value=ast.GeneratorExp(elt=made, generators=[loop]))):
                    for names in self._rounds(loop.target, loop.iter):
                        yield from _Problems({**self._names, **names})._problem(made)
                case _:
                    for field in ("body", "orelse"):
                        yield from self.of([one for one in getattr(statement, field, ()) if isinstance(one, ast.stmt)])

    def _rounds(self, target: ast.expr, over: ast.expr) -> Iterator[Names]:
        """Names in each round of a loop over a literal; one round without names for any other loop."""
        over = over.body if isinstance(over, ast.IfExp) else over
        over = self._names.get(over.id, over) if isinstance(over, ast.Name) else over
        match over:
            case ast.Call(func=ast.Attribute(value=inner, attr="items")):
                inner = self._names.get(inner.id, inner) if isinstance(inner, ast.Name) else inner
                inner = inner.body if isinstance(inner, ast.IfExp) else inner
                if isinstance(inner, ast.Dict):
                    for key, value in zip(inner.keys, inner.values, strict=True):
                        yield dict(_unpacked(target, ast.Tuple([key or ast.Constant(_VALUE), value])))
                    return
            case ast.Tuple(elts=elements) if elements:
                for element in elements:
                    yield dict(_unpacked(target, element))
                return
        yield {name.id: ast.Constant(_VALUE) for name in ast.walk(target) if isinstance(name, ast.Name)}

    def _problem(self, made: ast.expr) -> Iterator[tuple[str, str, str]]:
        match made:
            case ast.Tuple(elts=[field, _, rule, fix]):
                yield self._text(field), self._text(rule), self._text(fix)
            case ast.Call(func=ast.Name(id="Inert"), args=[field, why, use]):
                yield self._text(field), f"does nothing, since {self._text(why)}", self._text(use)

    def _text(self, node: ast.expr) -> str:
        return self._resolved(node, 0)

    def _resolved(self, node: ast.expr, depth: int) -> str:
        """Text of an expression; `…` for a value that is no text."""
        if depth > 8:
            return _VALUE
        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.JoinedStr(values=parts):
                return "".join(self._resolved(part, depth + 1) for part in parts)
            case ast.FormattedValue(value=value):
                return self._resolved(value, depth + 1)
            case ast.Name(id=name) if name in self._names and not _mentions(self._names[name], name):
                return self._resolved(self._names[name], depth + 1)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return f"{self._resolved(left, depth + 1)}{self._resolved(right, depth + 1)}"
            case ast.IfExp(body=body, orelse=other):
                return self._resolved(body, depth + 1) or self._resolved(other, depth + 1)
        return _VALUE


def _mentions(node: ast.expr, name: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node))


def _unpacked(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """(name, expression) of an assignment, parts of tuples included."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.IfExp):
        yield from _unpacked(target, value.body)
    elif isinstance(target, ast.Tuple):
        parts = value.elts if isinstance(value, ast.Tuple) else []
        for inner, part in zip(target.elts, parts or [ast.Constant(_VALUE)] * len(target.elts), strict=False):
            yield from _unpacked(inner, part)
