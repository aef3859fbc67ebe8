"""Conditions on the metadata of documents, as `language == en` or `quality >= 0.7`."""

import math
import operator
import re
from typing import Literal, NamedTuple, NoReturn

from maxlm.base import paths
from maxlm.base.errors import is_number

Operator = Literal["==", "!=", ">=", "<=", ">", "<", "in"]
Kind = Literal["bool", "int", "float", "text"]  # of a field of the metadata
_FORM = re.compile(r"\s*(?P<field>[^\s=!<>|]+)\s*(?P<operator>==|!=|>=|<=|>|<|\sin\s)\s*(?P<value>[^=<>!\s].*?)\s*")
COMPARE = {"==": operator.eq, "!=": operator.ne, ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
BOOLEANS = {"true": True, "false": False}


class Condition(NamedTuple):
    """`field operator value`; with `in` one of several values. A document that lacks the field meets no condition on it."""

    field: str
    operator: Operator
    values: tuple[str, ...]

    def typed(self, kind: Kind) -> list[str | float | bool]:
        """Convert its values to the kind of a field. Raises ValueError with the reason."""
        if kind == "text":
            if self.operator not in ("==", "!=", "in") and is_number(self.values[0]):
                raise ValueError("the field is text, or text and numbers, and text comes in the order of its letters")
            return list(self.values)
        if kind == "bool":
            if self.operator not in ("==", "!=", "in") or not {value.lower() for value in self.values} <= set(BOOLEANS):
                raise ValueError("the field is true or false")
            return [BOOLEANS[value.lower()] for value in self.values]
        return [_number(value) for value in self.values]

    def meets(self, value: str | float | bool | None) -> bool | None:
        """True if a document with `value` in the field meets the condition; None for a value of a kind that cannot be compared."""
        if value is None:
            return False
        kind: Kind = "text" if isinstance(value, str) else "bool" if isinstance(value, bool) else "float"
        try:
            values = self.typed(kind)
        except ValueError:
            return None
        return value in values if self.operator == "in" else bool(COMPARE[self.operator](value, values[0]))


def parse(text: str) -> Condition:
    """A condition. Raises PydanticCustomError if `text` is none."""
    match = _FORM.fullmatch(text)
    if match is None:
        refuse_form("be a condition, `FIELD OPERATOR VALUE` with one of == != < <= > >= in")
    sign = match["operator"].strip()
    values = [value.strip() for value in match["value"].split("|")] if sign == "in" else [match["value"]]
    if not all(values):
        refuse_form("name its values, with | between them")
    return Condition(match["field"], sign, tuple(values))  # type: ignore[arg-type]  # one of them, as the pattern says


def checked(text: str) -> str:
    """`text` if it is a condition, in its one spelling. Raises PydanticCustomError."""
    condition = parse(text)
    return f"{condition.field} {condition.operator} {' | '.join(condition.values)}"


def refuse_form(rule: str) -> NoReturn:
    """Reject a condition."""
    paths.refuse(rule, "write for example `language == en`, `quality >= 0.7` or `licence in mit | apache-2.0`")


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError("the field is a number")
    return int(text) if re.fullmatch(r"[+-]?\d+", text) and abs(number) < 2**63 else number
