"""Compare our plain text of wikitext with mwparserfromhell's (`pip install mwparserfromhell`) on the articles of dumps.

    python tools/lab/compare_wikitext.py DUMP ...

Prints for each parser its speed, the words it leaves, and how much markup stands in its text, by kind. Samples of real dumps are in the
wheel of gensim, gensim/test/test_data/*.xml*.bz2. Exit code 1 if more markup is left by ours than by the library.
"""

import re
import sys
import time
from collections import Counter
from collections.abc import Callable

import mwparserfromhell

from maxlm.documents import wikipedia
from maxlm.documents.reader import records
from maxlm.documents.records import Record
from maxlm.documents.wikitext import FILES_AND_CATEGORIES, WITHOUT_TEXT, plain_text

LOCAL = ("Файл", "Картинка", "Категория")  # names of files and categories in the dump of the Bulgarian Wikipedia
MARKUP = {
    "template": r"\{\{|\}\}",
    "link": r"\[\[|\]\]",
    "table": r"^\s*\{\||^\|",
    "tag": r"</?(?:ref|div|span|br|small|su[bp]|t[rd]|gallery|nowiki)\b",
    "caption": r"\b(?:thumb|right|left|upright|\d+px)\|",
    "category": r"^(?:Category|Категория):",
    "language": r"^[a-z]{2,3}:[A-ZА-Я]",
    "quotes": r"''+",
    "attribute": r"\b(?:style|align|colspan|rowspan)\s*=",
}


def without_elements(text: str) -> str:
    """The library's text after it has removed files, categories, tables and elements without text, as its users write it."""
    code = mwparserfromhell.parse(text)
    prefixes = re.compile(rf"\s*(?:{'|'.join((*FILES_AND_CATEGORIES, *LOCAL))})\s*:", re.IGNORECASE)
    gone = [link for link in code.filter_wikilinks(recursive=True) if prefixes.match(str(link.title))]
    gone += [tag for tag in code.filter_tags(recursive=True) if str(tag.tag).lower() in (*WITHOUT_TEXT, "table")]
    for node in gone:
        try:
            code.remove(node)
        except ValueError:  # inside one that is gone
            continue
    return str(code.strip_code())


PARSERS: dict[str, Callable[[str], str]] = {
    "ours": lambda text: plain_text(text, LOCAL),
    "strip_code": lambda text: str(mwparserfromhell.parse(text).strip_code()),
    "strip_code, elements removed": without_elements,
}


def articles(paths: list[str]) -> list[str]:
    """Wikitext of the articles, as the reader of dumps hands it over."""
    found: list[str] = []
    wikipedia.plain_text = lambda text, namespaces=(): found.append(text) or "x"  # type: ignore[assignment,func-returns-value]
    for path in paths:
        assert [one for one in records(path) if isinstance(one, Record)], f"{path}: no article of a dump"
    return found


def main() -> None:
    texts = articles(sys.argv[1:])
    size = sum(len(text.encode()) for text in texts)
    print(f"{len(texts):,} articles, {size / 1e6:.1f} MB; mwparserfromhell {mwparserfromhell.__version__}")
    left: dict[str, int] = {}
    for name, parse in PARSERS.items():
        began = time.process_time()
        plain = [parse(text) for text in texts]
        seconds = time.process_time() - began
        counts = Counter({kind: sum(len(re.findall(rule, text, re.MULTILINE)) for text in plain) for kind, rule in MARKUP.items()})
        left[name] = counts.total()
        words = sum(len(re.findall(r"\w+", text)) for text in plain)
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in counts.most_common() if count)
        print(f"{name}: {size / seconds / 1e6:.2f} MB a CPU second, {words:,} words, markup left: {counts.total():,} {kinds}", flush=True)
    sys.exit(left["ours"] > min(left.values()))


if __name__ == "__main__":
    main()
