"""Wikitext to plain text, in one pass of the text per kind of markup.

mwparserfromhell is the well-kept library. Of 112 articles of real dumps (docs/lab/corpus.md) its strip_code() leaves captions of
images, categories and parts of tables as text: 2,963 marks of markup, and none here, at an eighth of the speed. Told to remove them, it
leaves 361 at a thirtieth of the speed. What is here is linear in the length of the text, whatever is left unclosed.
"""

import re
from collections.abc import Iterable
from html import unescape

# English names, which every wiki understands; the wiki's own names come from its dump (en.wikipedia.org/wiki/Wikipedia:Namespace).
FILES_AND_CATEGORIES = ("file", "image", "media", "category")
# Elements without running text (mediawiki.org/wiki/Help:Formatting, /wiki/Help:Extension_tags).
WITHOUT_TEXT = (
    *("ref", "math", "chem", "gallery", "timeline", "imagemap"),
    *("score", "graph", "hiero", "templatestyles", "indicator", "mapframe"),
)
# Templates with words of the sentence (en.wikipedia.org/wiki/Template:Lang, :Convert, :Nowrap, :Spaced_en_dash).
_TEXT_TEMPLATES = (
    (re.compile(r"\{\{\s*(?:lang|transl|transliteration)\s*\|[^{}|]{0,40}\|([^{}|]*)\}\}", re.IGNORECASE), r"\1"),
    (re.compile(r"\{\{\s*lang-[a-z-]{2,12}\s*\|([^{}|]*)(?:\|[^{}]*)?\}\}", re.IGNORECASE), r"\1"),
    (re.compile(r"\{\{\s*(?:convert|cvt)\s*\|([^{}|]*)\|([^{}|]*)(?:\|[^{}]*)?\}\}", re.IGNORECASE), r"\1 \2"),
    (re.compile(r"\{\{\s*(?:nowrap|nobold|small|abbr|em|strong)\s*\|([^{}|]*)(?:\|[^{}]*)?\}\}", re.IGNORECASE), r"\1"),
    (re.compile(r"\{\{\s*(?:snd|spnd|spaced ndash|ndash|dash)\s*\}\}", re.IGNORECASE), " – "),
    (re.compile(r"\{\{\s*(?:nbsp|spaces)\s*\}\}", re.IGNORECASE), " "),
    (re.compile(r"\{\{\s*!\s*\}\}"), "|"),
)

_BLOCKS = re.compile(r"\{\{|\}\}|(?:(?<=\n)|^)[ \t:]*\{\||(?<=\n)[ \t]*\|\}(?!\})")
_LINKS = re.compile(r"\[\[|\]\]")
_INTERLANGUAGE = re.compile(r"(?:[a-z]{2,3}|simple|roa-[a-z]{3}|zh-[a-z-]+|be-[a-z-]+|bat-smg|fiu-vro|map-bms|nds-nl|cbk-zam)$")
_EXTERNAL = re.compile(r"\[(?:[a-z]{3,8}:)?//[^\s\[\]]+([^\[\]\n]*)\]")
_TAG = re.compile(r"</?[A-Za-z][^<>]{0,2000}>")
_QUOTES = re.compile(r"'{2,}")
_HEADING = re.compile(r"^(={1,6})[ \t]*([^\n]*?)[ \t]*\1[ \t]*$", re.MULTILINE)
_LIST = re.compile(r"^[*#:;]+[ \t]*", re.MULTILINE)
_MAGIC = re.compile(r"__[A-Z]{3,20}__")
_HOLLOW = re.compile(r"[ \t]*\([\s,;:–-]{0,20}\)")  # parentheses that held a template
_SPACES = re.compile(r"[ \t]+$|(?<=[^ \t\n]) +(?= )", re.MULTILINE)
_GAP = re.compile(r"\n{3,}")
_MARK = "\x02"  # before a heading, until it is known whether its section has text


def plain_text(wikitext: str, namespaces: Iterable[str] = ()) -> str:
    """Running text of a page: no templates, tables, references, files, categories or markup; headings of sections without text left out.

    `namespaces`: the wiki's own names for files and categories.
    """
    text = _without(wikitext.replace(_MARK, ""), "<!--", "-->")
    for name in WITHOUT_TEXT:
        if f"<{name}" in text:
            text = _without_element(text, name)
    for pattern, words in _TEXT_TEMPLATES:
        text = pattern.sub(words, text)
    text = _without_blocks(text)
    text = _links_replaced(text, {name.lower() for name in (*FILES_AND_CATEGORIES, *namespaces)})
    text = _EXTERNAL.sub(lambda match: match[1].strip(), text)
    text = unescape(_QUOTES.sub("", _TAG.sub("", text)))
    text = _LIST.sub("", _MAGIC.sub("", _HOLLOW.sub("", text)))
    text = _HEADING.sub(lambda match: f"{_MARK}{len(match[1])}{match[2]}", text)
    return _GAP.sub("\n\n", _SPACES.sub("", _without_empty_sections(text))).strip()


def _without(text: str, start: str, end: str) -> str:
    """`text` without what is between `start` and `end`. Where `end` is missing, the rest stays."""
    pieces, at = [], 0
    while (opened := text.find(start, at)) >= 0 and (closed := text.find(end, opened + len(start))) >= 0:
        pieces.append(text[at:opened])
        at = closed + len(end)
    return "".join([*pieces, text[at:]])


def _without_element(text: str, name: str) -> str:
    """`text` without the elements `<name ...>...</name>` and `<name ... />`."""
    tag = re.compile(f"<{name}(?:\\s[^<>]{{0,1000}})?>", re.IGNORECASE)
    end = f"</{name}>"
    pieces, at = [], 0
    while (opened := tag.search(text, at)) is not None:
        closed = opened.end() - 1 if opened[0].endswith("/>") else text.find(end, opened.end())
        if closed < 0:
            break
        pieces.append(text[at : opened.start()])
        at = closed + (1 if opened[0].endswith("/>") else len(end))
    return "".join([*pieces, text[at:]])


def _without_blocks(text: str) -> str:
    """`text` without templates and tables, which may be in one another. One that is not closed loses its brackets only."""
    kept: list[str] = []  # pieces of text, and of blocks that are open
    opened: list[tuple[int, str]] = []  # index in `kept` at which a block begins, and its end
    at = 0
    for match in _BLOCKS.finditer(text):
        kept.append(text[at : match.start()])
        at = match.end()
        mark = match[0].strip(" \t:")
        if mark in ("{{", "{|"):
            opened.append((len(kept), "}}" if mark == "{{" else "|}"))
        else:
            depth = next((i for i in range(len(opened) - 1, max(-1, len(opened) - 40), -1) if opened[i][1] == mark), None)
            if depth is not None:
                del kept[opened[depth][0] :]
                del opened[depth:]
    return "".join([*kept, text[at:]])


def _links_replaced(text: str, dropped: set[str]) -> str:
    """`text` with links as their labels, and without those to files, categories and other languages."""
    stack: list[list[str]] = [[]]
    at = 0
    for match in _LINKS.finditer(text):
        stack[-1].append(text[at : match.start()])
        at = match.end()
        if match[0] == "[[":
            stack.append([])
        elif len(stack) > 1:
            label = _label("".join(stack.pop()), dropped)
            stack[-1].append(label)
    stack[-1].append(text[at:])
    return "".join(piece for level in stack for piece in level)


def _label(link: str, dropped: set[str]) -> str:
    target, bar, label = link.partition("|")
    prefix, colon, _ = target.strip().partition(":")
    if colon and (prefix.strip().lower() in dropped or _INTERLANGUAGE.match(prefix)):
        return ""
    return label.rpartition("|")[2] if bar else target.removeprefix(":")


def _without_empty_sections(text: str) -> str:
    """Headings, on lines of their own, of sections that have text in them or in a section below."""
    lines: list[str] = []
    waiting: list[tuple[int, str]] = []  # headings without text so far, from outer to inner
    for line in text.split("\n"):
        if line.startswith(_MARK):
            level = int(line[1])
            while waiting and waiting[-1][0] >= level:
                waiting.pop()
            waiting.append((level, line[2:]))
        else:
            if line.strip() and waiting:
                lines += [part for _, heading in waiting for part in ("", heading, "")]
                waiting = []
            lines.append(line)
    return "\n".join(lines)
