"""`report.html` of a corpus: what came in, what each pass removed and why, as one self-contained page. All text of documents is escaped."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from maxlm.corpus.tasks import total
from maxlm.telemetry import pages
from maxlm.telemetry.pages import table

MOST = 40  # languages shown; the rest are added up

Pass = Mapping[str, Any]


def page(report: Mapping[str, Any]) -> str:
    """The page for what engine.summarize() returned."""
    passes: list[Pass] = report["passes"]
    came, size = total(passes[0]["came"])
    bars = [("read", came, size), *((one["name"], one["documents"], one["bytes"]) for one in passes)]
    counts = [(escape(name), count, f"{count:,} documents, {megabytes(some)}") for name, count, some in bars]
    reasons, cuts = (
        ("stage/reason and pass", "documents", "of those read"),
        ("stage/reason and pass", "documents", "characters, or data masked"),
    )
    sections = [
        _head(report),
        f"<section><h2>Documents after each pass</h2>{_bars(counts)}</section>",
        _table("What was removed, and why", reasons, _reasons(passes, "removed", came)),
        _table("What stays with a tag, and why", reasons, _reasons(passes, "tagged", came)),
        _table(
            "What was cut from documents that stay",
            cuts,
            [[_of_pass(reason, one), f"{documents:,}", f"{amount:,}"] for one, reason, (documents, amount) in _all(passes, "cut")],
        ),
        _sources(passes),
        _languages(passes[-1]),
        _lengths(passes),
        _copies(passes),
    ]
    hint = "Not searched: empty items, duplicates of others, short ones (too few words in a row) and common ones (nothing in them is rare)."
    if items := "".join(f"<li>{escape(line)}</li>" for line in searched(report)):
        sections.append(f"<section><h2>Evaluation sets</h2><ul>{items}</ul><p>{hint}</p></section>")
    sections += [_examples(passes), _settings(report["settings"])]
    css = files(__package__).joinpath("page.css").read_text("utf-8")
    return pages.page("Corpus report", map(_printable, sections), css=css)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"<section><h2>{title}</h2>{table(heads, rows, numbers=True)}</section>" if rows else ""


def _head(report: Mapping[str, Any]) -> str:
    passes: list[Pass] = report["passes"]
    documents, size = total(passes[0]["came"])
    set_aside = unread(report)
    left, left_size = passes[-1]["documents"], passes[-1]["bytes"]
    cards = (
        ("Came in", f"{documents + set_aside:,}", f"records of {report['input_files']:,} file{'' if report['input_files'] == 1 else 's'}"),
        ("Set aside", f"{set_aside:,}", "without text, or could not be read"),
        ("Read", f"{documents:,}", "documents"),
        ("Text", megabytes(size), "of UTF-8"),
        ("Left", f"{left:,}", f"documents, {share(left, documents)}"),
        ("Text left", megabytes(left_size), share(left_size, size)),
    )
    lead = (
        "Each document that came in is in documents/ or in one list of removed/. Sizes are of text as UTF-8. "
        "Examples are chosen by a hash of the document's name, the same in each run."
    )
    title = '<p class="kind">Corpus report</p><h1>What came in and what is left</h1>'
    return f"<header>{title}<p class=lead>{lead}</p>{pages.cards(cards)}</header>"


def unread(report: Mapping[str, Any]) -> int:
    """Records of the input that no document was made of."""
    return sum(count for reason, count in report["passes"][0]["removed"].items() if reason.startswith("read/"))


def _reasons(passes: Sequence[Pass], kind: str, came: int) -> list[list[str]]:
    return [[_of_pass(reason, one), f"{count:,}", share(count, came)] for one, reason, count in _all(passes, kind)]


def _of_pass(reason: str, one: Pass) -> str:
    return f"{escape(reason)} <small>{escape(one['name'])}</small>"


def _all(passes: Sequence[Pass], kind: str) -> Iterator[tuple[Pass, str, Any]]:
    """Pass, reason and count, the most frequent reason of a pass first; of what was cut, by name."""
    for one in passes:
        for reason, count in sorted(one[kind].items(), key=lambda item: (0 if kind == "cut" else -item[1], item[0])):
            yield one, reason, count


def _sources(passes: Sequence[Pass]) -> str:
    heads = ("source", "read", "text", *(f"after {escape(one['name'])}" for one in passes), "text left", "left")
    rows = []
    for name, (documents, size) in sorted(passes[0]["came"].items()):
        left = [one["left"].get(name, (0, 0)) for one in passes]
        counts = [f"{count:,}" for count, _ in left]
        rows.append([escape(name), f"{documents:,}", megabytes(size), *counts, megabytes(left[-1][1]), share(left[-1][1], size)])
    return _table("Sources", heads, rows)


def _languages(last: Pass) -> str:
    found = sorted(last["languages"].items(), key=lambda item: (-item[1][1], item[0]))
    if not found or list(last["languages"]) == ["unknown"]:
        return ""
    shown = [(escape(name), size, f"{count:,} documents, {megabytes(size)}") for name, (count, size) in found[:MOST]]
    if found[MOST:]:
        count, size = total(dict(found[MOST:]))
        shown.append((f"{len(found) - MOST:,} others", size, f"{count:,} documents, {megabytes(size)}"))
    return f"<section><h2>Languages of what is left</h2>{_bars(shown)}</section>"


def _lengths(passes: Sequence[Pass]) -> str:
    came, left = passes[0]["lengths_came"], passes[-1]["lengths_left"]
    bins = [int(name) for name in {**came, **left}]
    if not bins:
        return ""
    bars = []
    most = max(came.values(), default=1)
    width, height, step = 900, 220, 900 / (max(bins) - min(bins) + 1)
    for place, number in enumerate(range(min(bins), max(bins) + 1)):
        before, after = came.get(str(number), 0), left.get(str(number), 0)
        first, text = place * step, f"{(1 << number) >> 1:,} to {(1 << number) - 1:,} characters: {before:,} read, {after:,} left"
        shapes = "".join(
            f'<rect class="{color}" x="{first + shift * step:.1f}" y="{height - tall:.1f}" width="{0.38 * step:.1f}" height="{tall:.1f}"/>'
            for color, shift, tall in (("c0", 0.1, height * before / most), ("c1", 0.5, height * after / most))
        )
        label = f'<text x="{first + step / 2:.1f}" y="{height + 18}" text-anchor="middle">{_short((1 << number) >> 1)}</text>'
        bars.append(f"<g><title>{text}</title>{shapes}{label}</g>")
    legend = '<p class="legend"><span><span class="swatch c0"></span>read</span><span><span class="swatch c1"></span>left</span></p>'
    chart = f'<div class="scroll"><svg class="lengths" viewBox="0 0 {width} {height + 40}" role="img">{"".join(bars)}</svg></div>'
    unit = '<p class="note">Documents by length; each bar holds lengths from its number of characters to twice as many.</p>'
    return f"<section><h2>Lengths</h2>{legend}{chart}{unit}</section>"


def _copies(passes: Sequence[Pass]) -> str:
    """Clusters by size, in bins of powers of two: a cluster of n documents removes n - 1."""
    bins: dict[int, tuple[int, int]] = {}
    for one in passes:
        for name, removed in one["copies"].items():
            size = int(name)
            clusters, documents = bins.get((size - 1).bit_length(), (0, 0))
            bins[(size - 1).bit_length()] = clusters + removed // (size - 1), documents + removed
    rows = []
    for number, (clusters, documents) in sorted(bins.items()):
        low, high = (1 << number >> 1) + 1, 1 << number
        rows.append([f"{low:,}" if low == high else f"{low:,} to {high:,}", f"{clusters:,}", f"{documents:,}"])
    return _table("Copies, by size of their cluster", ("documents in the cluster", "clusters", "removed"), rows)


def searched(report: Mapping[str, Any]) -> list[str]:
    """A line for each evaluation set: how many of its items were searched, and why others were not."""
    lines = []
    for name, counts in sorted(item for one in report["passes"] for item in one.get("sets", {}).items()):
        left_out = [f"{count:,} {reason}" for reason, count in sorted(counts.items()) if reason != "searched"]
        lines.append(", ".join([f"{name}: {counts['searched']:,} of {sum(counts.values()):,} items searched", *left_out]))
    return lines


def _examples(passes: Sequence[Pass]) -> str:
    blocks = []
    for one, reason, count in (*_all(passes, "removed"), *_all(passes, "tagged"), *_all(passes, "cut")):
        items = ""
        for example in one["examples"][reason]:
            figures = {key: f"{v:.4g}" if isinstance(v, float) else _printable(str(v)) for key, v in sorted(example["detail"].items())}
            detail = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in figures.items())
            items += f"<h3><code>{escape(example['id'])}</code></h3><dl>{detail}</dl><pre>{escape(_printable(example['example']))}</pre>"
        documents = count if isinstance(count, int) else count[0]  # of what was cut also how much
        blocks.append(f"<details><summary>{escape(reason)} <small>{documents:,} documents</small></summary>{items}</details>")
    return f"<section class=folded><h2>Examples of what was removed or tagged</h2>{''.join(blocks)}</section>" if blocks else ""


def _settings(settings: Mapping[str, Any]) -> str:
    """Settings that decided the result, thresholds and parameters by default included, of the parts that were on."""
    shown = json.dumps(
        {name: _without_none(part) for name, part in settings.items() if part is not None}, indent=1, ensure_ascii=False, sort_keys=True
    )
    block = f"<details><summary>as JSON</summary><pre>{escape(_printable(shown))}</pre></details>"
    return f"<section class=folded><h2>Settings of this run</h2>{block}</section>"


def _without_none(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    return {name: _without_none(value) for name, value in part.items() if value is not None}


def _printable(text: str) -> str:
    """Text that a file of UTF-8 holds: lone surrogates are shown as their code."""
    return text.encode("utf-8", "backslashreplace").decode()


def _bars(rows: Iterable[tuple[str, int, str]]) -> str:
    rows = list(rows)
    most = max((count for _, count, _ in rows), default=0) or 1
    cells = "".join(
        f'<span>{name}</span><span class="soft">{text}</span><div><i class="c0" style="width:{100 * count / most:.2f}%"></i></div>'
        for name, count, text in rows
    )
    return f'<div class="bars">{cells}</div>'


def _short(number: int) -> str:
    for scale, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k")):
        if number >= scale:
            return f"{number // scale}{letter}"
    return str(number)


def megabytes(size: int) -> str:
    """950 -> 0.001 MB; 61400000 -> 61.4 MB; 2100000000 -> 2.1 GB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e6:.3f} MB"


def share(part: int, whole: int) -> str:
    """Percent of the whole, as HTML; a dash where there is none."""
    if not whole:
        return "–"
    return "&lt;0.1%" if 0 < part < whole / 1000 else f"{100 * part / whole:.1f}%"
