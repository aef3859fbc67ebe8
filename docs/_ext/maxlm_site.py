"""Sphinx extension of the site: links into the repository, a `.md` of every page, and `llms.txt`.

A page links to a file of the source by its relative path, which a code host follows. The site has no copy of the source: there the link
becomes the path itself.
"""

import json
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(((?:\.\./)+[^()\s#]+)(#[^()\s]*)?\)")
CARD = re.compile(r"^:::\{grid-item-card\} (?P<title>.*)\n:link: (?P<page>.*)\n(?::.*\n)*(?P<text>(?:(?!:::).*\n)*):::$", re.MULTILINE)
GRID = re.compile(r"^::::.*\n(?::[a-z].*\n)*", re.MULTILINE)
TOCTREE = re.compile(r"^```\{toctree\}\n(?P<options>(?::.*\n)*)(?P<pages>(?:(?!```).*\n)*)```$", re.MULTILINE)
SUMMARY = "Pretraining, fine-tuning and evaluation of transformers in JAX, on TPU pods, GPU clusters and a laptop."


def without_source_links(text: str, page: Path, docs: Path) -> str:
    """Replace each link that leaves `docs` by its text and the path in the repository."""

    def replaced(match: re.Match[str]) -> str:
        label, path = match[1], (page.parent / match[2]).resolve()
        if path.is_relative_to(docs) or not path.is_relative_to(docs.parent):
            return match[0]
        name = path.relative_to(docs.parent).as_posix()
        shown = label.strip("`")
        return f"`{name}`" if shown == name or name.endswith(f"/{shown}") else f"{label} (`{name}`)"

    return LINK.sub(replaced, text)


def without_directives(text: str) -> str:
    """Replace the cards and lists of pages that Sphinx renders by lists of links."""

    def listed(match: re.Match[str]) -> str:
        if ":hidden:" in match["options"]:
            return ""
        return "\n".join(f"- [{name}]({name}.md)" for name in match["pages"].split())

    text = CARD.sub(lambda card: f"- [{card['title']}]({card['page']}.md): {card['text'].strip()}", text)
    return TOCTREE.sub(listed, GRID.sub("", text)).rstrip() + "\n"


def read_source(app: Any, docname: str, source: list[str]) -> None:
    """Replace links to source files before MyST parses a page."""
    page = Path(app.env.doc2path(docname))
    if page.suffix == ".md":
        source[0] = without_source_links(source[0], page, Path(app.srcdir))


def markdown_of(page: Path, docs: Path) -> str:
    """The text of a page, or of a notebook its cells."""
    if page.suffix == ".md":
        return without_directives(without_source_links(page.read_text(encoding="utf-8"), page, docs))
    cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
    texts = [("".join(cell["source"]), cell["cell_type"]) for cell in cells]
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for text, kind in texts) + "\n"


def first_sentence(text: str) -> str:
    """The first sentence below the title, without links and directives."""
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.strip() and not re.match(r"\s*(#|```|:::|\||!\[|- |---|\()", paragraph):
            plain = re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
            return re.split(r"(?<=[.:!?])\s", plain)[0].rstrip(":")
    return ""


def write_texts(app: Any, exception: Exception | None) -> None:
    """Write NAME.md next to NAME.html for every page, and llms.txt, which lists the pages in the order of the site."""
    if exception is not None or app.builder.format != "html":
        return
    env, docs, out = app.env, Path(app.srcdir), Path(app.outdir)
    order: list[str] = []

    def visit(name: str) -> None:
        if name not in order:
            order.append(name)
            for child in env.toctree_includes.get(name, []):
                visit(child)

    visit(app.config.root_doc)
    lines = [f"# {app.config.project} {app.config.release}", "", f"> {SUMMARY}", ""]
    for name in order:
        text = markdown_of(Path(env.doc2path(name)), docs)
        target = out / f"{name}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        title = env.titles[name].astext()
        if name.endswith("/index"):
            lines += ["", f"## {title}", ""]
        elif name != app.config.root_doc:
            lines.append(f"- [{title}]({name}.md): {first_sentence(text)}")
    (out / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.connect("source-read", read_source)
    app.connect("build-finished", write_texts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
