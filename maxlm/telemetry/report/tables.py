"""HTML tables of the pages that maxlm writes: reports of runs, corpora and ladders."""

from collections.abc import Iterable, Sequence


class Cell(str):
    """HTML of a cell with the number that it shows, by which a column is sorted."""

    value: float

    def __new__(cls, html: str, value: float) -> "Cell":
        cell = super().__new__(cls, html)
        cell.value = float(value)
        return cell


def table(heads: Iterable[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """A table of cells that are HTML, text escaped; the first cell of a row is its header. `numbers`: the others, aligned to the right."""
    head = "".join(f"<th scope=col>{cell}</th>" for cell in heads)
    body = "".join(f"<tr><th scope=row>{row[0]}</th>{''.join(map(_cell, row[1:]))}</tr>" for row in rows)
    kind = " class=numbers" if numbers else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(html: str) -> str:
    number = f' data-value="{repr(html.value).replace("inf", "Infinity")}"' if isinstance(html, Cell) else ""  # as JavaScript reads it
    return f"<td{number}>{html}</td>"
