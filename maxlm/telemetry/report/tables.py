"""HTML tables of the pages that maxlm writes: reports of runs, corpora and ladders."""

from collections.abc import Iterable, Sequence


def table(heads: Iterable[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """A table of cells that are HTML, text escaped; the first cell of a row is its header. `numbers`: the others, aligned to the right."""
    head = "".join(f"<th scope=col>{cell}</th>" for cell in heads)
    body = "".join(f"<tr><th scope=row>{row[0]}</th>{''.join(f'<td>{cell}</td>' for cell in row[1:])}</tr>" for row in rows)
    kind = " class=numbers" if numbers else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
