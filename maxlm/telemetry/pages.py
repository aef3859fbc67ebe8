"""HTML pages of maxlm: one self-contained file each, for reports of runs, profiles, ladders and corpora."""

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

import jinja2

from maxlm.base.strict_json import encodable
from maxlm.telemetry.formatting import percent

# No network access: a page works from a disk, a mail or a bucket.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
SCRIPTS_POLICY = f"{POLICY}; script-src 'unsafe-inline'"

_SECTION = re.compile(r"<section([^>]*)><h2>([^<]+)</h2>")
_TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined)


def page(
    title: str,
    sections: Iterable[str],
    *,
    css: str = "",
    scripts: str = "",
    policy: str = POLICY,
    meta: Mapping[str, str] | None = None,
    version: str = "",
) -> str:
    """A page of sections that are HTML; empty ones are left out. `meta`: name -> content; `version`: of a page that a server replaces."""
    css = (Path(__file__).parent / "page.css").read_text(encoding="utf-8") + css
    return encodable(
        _TEMPLATES.get_template("page.html").render(
            title=title, sections=sections, css=css, scripts=scripts, policy=policy, meta=meta or {}, version=version
        )
    )


def contents(sections: Sequence[str]) -> list[str]:
    """The sections with anchors, and after the first one links to the sections with a title."""
    linked, links = [], ""
    for section in sections:
        if found := _SECTION.match(section):
            anchor = re.sub(r"[^a-z0-9]+", "-", found[2].lower()).strip("-")
            section = f'<section{found[1]} id="{anchor}">{section[found.end(1) + 1 :]}'
            links += f'<a href="#{anchor}">{found[2]}</a> '
        linked.append(section)
    return [*linked[:1], f'<nav class="contents">{links}</nav>' if links else "", *linked[1:]]


def cards(figures: Iterable[tuple[str, str, str]]) -> str:
    """Cards of (name, value, hint); values are HTML."""
    blocks = "".join(f"<div><dt>{name}</dt><dd>{value}</dd><small>{hint}</small></div>" for name, value, hint in figures)
    return f'<dl class="cards">{blocks}</dl>'


def bar(parts: Iterable[tuple[str, float, str, str]], about: str) -> str:
    """A bar with its key. Parts: name, share of the whole, CSS of the colour, more HTML for the key."""
    slices, keys = "", ""
    for name, share, colour, more in parts:
        title = f"{escape(name)}: {percent(share)}"
        slices += f'<span class="part" style="width:{100 * share:.3f}%;{colour}" title="{title}"></span>'
        keys += f'<li><span class="swatch part" style="{colour}"></span>{escape(name)} <b>{percent(share)}</b>{more}</li>'
    return f'<div class="bar" role="img" aria-label="{about}">{slices}</div><ul class="keys">{keys}</ul>'


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
