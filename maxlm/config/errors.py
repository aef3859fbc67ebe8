"""The one error a user's input can raise. The command line prints it as one line and exits with code 2."""

from typing import Any


class UserError(Exception):
    """The user's input cannot be honoured. `str(error)` is one line somebody can act on."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ConfigError(UserError):
    """A field whose value breaks a rule: says field, value, rule and fix."""

    def __init__(self, field: str, value: Any, rule: str, fix: str, source: str = "") -> None:
        self.field = field
        origin = f" (from {source})" if source else ""
        super().__init__(f"{field} = {show(value)}{origin}: {rule}; {fix}.")


def show(value: Any) -> str:
    """`value` as it would be typed in YAML, shortened to fit in a line."""
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    else:
        text = str(value) if isinstance(value, int | float | str) and value != "" else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
