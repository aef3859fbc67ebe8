"""Evaluation items planted in documents of real text in several layouts, and the same templates with other numbers and names."""

import html
import json
import random
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from corpora.quality import Row, package_files
from maxlm.corpus.decontaminate import DecontaminateSettings, Decontaminator, EvalIndex, EvalSet, Frequencies
from maxlm.corpus.document import Document, Removed
from maxlm.documents.html import of_html
from maxlm.documents.records import Record

PACKAGES = ("debian-reference-en", "debian-reference-de", "debian-reference-fr", "debian-reference-ja", "debian-reference-zh-cn")
SENTENCES = ("debian-faq", "debian-faq-ja", "debian-faq-zh-cn")  # of which items are made: none of them is in a document
SIZE = 3000  # characters of a document
SPELLED = "word problem, numbers spelled out"  # 11 words for numbers: some of other problems are the item's own
EACH = 60  # items of a kind, and as many of its templates with other numbers and names
NAMES = str.split(
    "Ada Bruno Carla Dmitri Elena Farid Greta Hiro Ingrid Jamal Katya Luis Mina Nadia Omar Priya Quentin Rosa Sven Tomas Ursula Viktor "
    "Wanda Xavier Yara Zoltan Albert Bianca Cedric Dalia"
)
PLACES = str.split(
    "Peru Kenya Laos Chad Fiji Oman Cuba Mali Togo Iran Iraq Nepal Benin Gabon Ghana Haiti Italy Japan Libya Malta Nauru Niger Palau Qatar "
    "Samoa Spain Sudan Syria Tonga Yemen Angola Belize Bhutan Brunei Canada Cyprus France Gambia Greece Guinea Guyana Israel Jordan Kuwait "
    "Latvia Malawi Mexico Monaco Norway Panama Poland Russia Rwanda Serbia Sweden Turkey Tuvalu Uganda Zambia Albania"
)
PROBLEMS = (
    "{a} picked {m} apples in the morning and {n} in the afternoon, and gave {k} of them to {b}. How many apples does {a} have left?",
    "A train leaves {p} at {k} o'clock and travels at {m} km per hour for {n} hours before it stops. How far has the train gone by then?",
    "{a} sold {m} tickets for the fair in {p} on Friday, and on Saturday sold {n} more than that. How many did {a} sell altogether?",
    "{a} earns ${m} an hour for babysitting {b}'s children. Yesterday the work took {n} minutes. How much money was earned yesterday?",
    "There are {m} students in {a}'s class, and each of them brings {k} pencils. If {n} pencils are lost, how many pencils are left?",
    "{a} reads {m} pages of a book each day, while {b} reads {n} pages. How many more pages will {b} have read after {k} days?",
)
NUMBERS = ("three", "four", "five", "six", "seven", "eight", "nine", "eleven", "twelve", "fifteen", "twenty")


class Item(NamedTuple):
    question: str
    options: tuple[str, ...] = ()


def measure(folder: Path, seed: int) -> Iterator[Row]:
    """Rows by kind of item: found in any layout, and false among its templates; by layout; and of the real text itself."""
    draw = random.Random(seed)
    documents, sentences = _real_text(folder, draw)
    items, siblings = _items(draw, sentences)
    planted: list[tuple[str, str, Document]] = []
    for kind, some in items.items():
        for number, item in enumerate(some):
            layout = list(LAYOUTS)[number % len(LAYOUTS)]
            planted.append((kind, layout, _document(f"{kind} {number}", draw, documents, LAYOUTS[layout](item, draw))))
    others = [
        (kind, _document(f"sibling {kind} {number}", draw, documents, LAYOUTS[list(LAYOUTS)[number % len(LAYOUTS)]](item, draw)))
        for kind, some in siblings.items()
        for number, item in enumerate(some)
    ]
    texts = [Document(f"text {number}", text) for number, text in enumerate(documents)]
    removed = _removed(
        folder / "items.jsonl",
        [item for some in items.values() for item in some],
        [
            *(one for *_, one in planted),
            *(one for _, one in others),
            *texts,
        ],
    )
    for kind in items:
        ids, other = [one.id for name, _, one in planted if name == kind], [one.id for name, one in others if name == kind]
        yield Row(kind, len(ids), len(removed & set(ids)), len(removed & set(other)), len(other), 0.9 if kind == SPELLED else 0.95)
    for layout in LAYOUTS:
        ids = [one.id for _, name, one in planted if name == layout]
        yield Row(f"layout: {layout}", len(ids), len(removed & set(ids)), 0)
    yield Row("real text without items", 0, 0, len(removed & {one.id for one in texts}), len(texts))


def _real_text(folder: Path, draw: random.Random) -> tuple[list[str], dict[str, list[str]]]:
    """Documents of about SIZE characters, and sentences of other manuals by language."""
    documents, sentences = list[str](), {"en": list[str](), "cjk": list[str]()}
    for package, _, content in package_files(folder, [*PACKAGES, *SENTENCES], r"usr/share/.*\.txt(?:\.gz)?"):
        text = content.decode("utf-8", "replace")
        if package in PACKAGES:
            documents += [text[start : start + SIZE] for start in range(0, len(text), SIZE)]
        elif package == "debian-faq":
            sentences["en"] += re.findall(r"(?<=[.] )[A-Z][a-z]+(?: [a-z]+,?){7,25}[.]", " ".join(text.split()))
        else:
            sentences["cjk"] += re.findall(r"[^。\s]{20,60}。", text)
    for name, some in sentences.items():
        sentences[name] = list(dict.fromkeys(some))
        draw.shuffle(sentences[name])
    return documents, sentences


def _items(draw: random.Random, sentences: dict[str, list[str]]) -> tuple[dict[str, list[Item]], dict[str, list[Item]]]:
    """Items by kind, and items of the same templates with other names and numbers; none for a kind without a template."""
    items: dict[str, list[Item]] = {kind: [] for kind in (*_MAKERS, "exam", "Japanese and Chinese")}
    siblings: dict[str, list[Item]] = {kind: [] for kind in items}
    for kind, make in _MAKERS.items():
        seen = set()
        for number in range(20 * EACH):
            item = make(draw, number)
            if item.question not in seen:
                seen.add(item.question)
                (items[kind] if len(items[kind]) < EACH else siblings[kind]).append(item)
            if len(siblings[kind]) == EACH:
                break
    for kind, language in (("exam", "en"), ("Japanese and Chinese", "cjk")):
        some = sentences[language]
        for start in range(0, min(5 * EACH, len(some) - 5), 5):
            items[kind].append(Item(some[start].rstrip(".。") + ("？" if language == "cjk" else "?"), tuple(some[start + 1 : start + 5])))
    return items, siblings


def _capital(draw: random.Random, number: int) -> Item:
    one = PLACES[number % len(PLACES)] if number < EACH else f"{draw.choice(NAMES)}land"
    return Item(f"What is the capital of {one}?", (f"{one}ville", f"{one}burg", f"New {one}", f"{one} City"))


def _ten_options(draw: random.Random, number: int) -> Item:
    del number
    return Item(
        f"Which of these did {draw.choice(NAMES)} of {draw.choice(PLACES)} find?", tuple(" ".join(draw.sample(NAMES, 2)) for _ in range(10))
    )


def _who_wrote(draw: random.Random, number: int) -> Item:
    del number
    return Item(f"Who wrote the novel {draw.choice(NAMES)} and {draw.choice(NAMES)} in {draw.choice(PLACES)}?")


def _problem(draw: random.Random, number: int) -> Item:
    a, b = draw.sample(NAMES, 2)
    m, n, k = draw.sample(range(11, 400), 3)
    return Item(PROBLEMS[number % len(PROBLEMS)].format(a=a, b=b, m=m, n=n, k=k, p=draw.choice(PLACES)))


def _spelled(draw: random.Random, number: int) -> Item:
    a, b = draw.sample(NAMES, 2)
    m, n, k = draw.sample(NUMBERS, 3)
    return Item(PROBLEMS[number % len(PROBLEMS)].format(a=a, b=b, m=m, n=n, k=k, p=draw.choice(PLACES)))


def _equation(draw: random.Random, number: int) -> Item:
    del number
    a, b, c, d = draw.sample(range(2, 97), 4)
    return Item(
        f"Solve \\(\\frac{{x}}{{{a}}} + {b}x^2 = \\sqrt{{{c}}}\\) for x, where x is at least {d}.",
        tuple(str(draw.randrange(1000)) for _ in range(4)),
    )


def _code(draw: random.Random, number: int) -> Item:
    del number
    one, two = draw.sample(NAMES, 2)
    a, b, c = (draw.randrange(10, 999) for _ in range(3))
    return Item(
        f'def {one.lower()}_{two.lower()}(values: list[int]) -> int:\n    """Count values above {a} that are not {b}.\n\n    '
        f'>>> {one.lower()}_{two.lower()}([{a}, {b}, {c}])\n    {c % 3}\n    """\n'
    )


_MAKERS: dict[str, Callable[[random.Random, int], Item]] = {
    "options of two words": _capital,
    "ten options of two words": _ten_options,
    "who wrote X": _who_wrote,
    "word problem": _problem,
    SPELLED: _spelled,
    "equation": _equation,
    "code": _code,
}


def _lettered(item: Item, draw: random.Random) -> str:
    del draw
    return " ".join([item.question, *(f"{letter}) {one}" for letter, one in zip("ABCDEFGHIJ", item.options, strict=False))])


def _by_lines(item: Item, draw: random.Random) -> str:
    options = [f"Option {number}: {one}" for number, one in enumerate(draw.sample(item.options, len(item.options)), 1)]
    return "\n".join([f"Question {draw.randrange(100)}.", item.question, *options, "Answer:"])


def _answer_first(item: Item, draw: random.Random) -> str:
    return "\n".join([*(f"- {one}" for one in item.options), f"These are the answers to: {item.question}"])


def _quoted(item: Item, draw: random.Random) -> str:
    del draw
    lines = [line for part in _lettered(item, random.Random(0)).split("\n") for line in textwrap.wrap(part, 28) or [""]]
    return "\n".join(f"> {line}" for line in lines)


def _table(item: Item, draw: random.Random) -> str:
    """An HTML table, as the reader of pages gives it."""
    cells = "".join(f"<tr><td>{html.escape(one)}</td><td>{draw.randrange(100)} votes</td></tr>" for one in item.options)
    head = f"<tr><th colspan=2><pre>{html.escape(item.question)}</pre></th></tr>"
    page = f"<html><body><main><h1>Quiz</h1><p>Vote below.</p><table>{head}{cells}</table></main></body></html>"
    found = of_html(1, "", page.encode(), {})
    return str(found.text) if isinstance(found, Record) else ""


def _other_punctuation(item: Item, draw: random.Random) -> str:
    return _by_lines(item, draw).translate(str.maketrans("?.,:'() ", "？。，：’（）\u00a0"))


LAYOUTS: dict[str, Callable[[Item, random.Random], str]] = {
    "in one line": _lettered,
    "by lines, options in another order": _by_lines,
    "answers first": _answer_first,
    "quoted, in short lines": _quoted,
    "HTML table": _table,
    "other punctuation": _other_punctuation,
}


def _document(id: str, draw: random.Random, documents: list[str], middle: str) -> Document:
    text = draw.choice(documents)
    at = text.find("\n", len(text) // 2) + 1
    return Document(id, f"{text[:at]}\n{middle}\n{text[at:]}")


def _removed(path: Path, items: list[Item], documents: list[Document]) -> set[str]:
    path.write_text("".join(json.dumps({"question": one.question, "choices": one.options}) + "\n" for one in items))
    settings = DecontaminateSettings(sets={"planted": EvalSet(path=str(path), fields=("question",), options=("choices",))})
    index = EvalIndex.build(settings, Frequencies.learn(settings, documents))
    return {one.id for one in Decontaminator(index).run(documents) if isinstance(one, Removed)}
