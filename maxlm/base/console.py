"""Console for text with names from outside: they are neither markup nor codes of emoji, and no control character reaches a terminal."""

from typing import Any

from rich.console import Console as RichConsole
from rich.text import Text

from maxlm.base.errors import printable


class Console(RichConsole):
    """rich's console without markup. A folder named `[/b]` would end a command with an error, and an escape sequence move the cursor."""

    def __init__(self, **settings: Any) -> None:
        """`settings`: as of rich's console."""
        super().__init__(**{"markup": False, "emoji": False, **settings})

    def render_str(self, text: str, **settings: Any) -> Text:
        """Text of a line or a table's cell; control characters and marks of writing direction become visible escapes."""
        return super().render_str("\n".join(map(printable, text.split("\n"))), **settings)


def print_line(console: RichConsole, line: str) -> None:
    """Print a line without colours and without breaking it at the width of the terminal, so that it can be copied or searched for."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)
