"""Tables of the study of a real corpus: sources before and after cleaning, what was removed and why, held-out loss."""

import json
from collections import Counter
from pathlib import Path
from statistics import fmean

from real_study import AFTER, BEFORE, bits_per_byte, losses, read_lines, source_of

FAMILIES = {  # beginnings of reasons, as "stage/reason"
    "unread": ("read/",),
    "short": ("length/", "gopher_quality/gopher_too_few_words"),
    "long": ("gopher_quality/gopher_too_many_words",),
    "repetition": ("gopher_repetition/", "repeated_lines/"),
    "quality": ("gopher_quality/",),
    "copies": ("deduplicate/",),
}


def tables(folder: Path) -> str:
    """Both tables in Markdown."""
    return f"{_corpus_table(folder)}\n\n{_loss_table(folder)}\n"


def _corpus_table(folder: Path) -> str:
    removed: dict[str, Counter[str]] = {}
    for path in sorted((folder / f"corpus/{AFTER}/removed").glob("*/*.zst")):
        for line in read_lines(path):
            one = json.loads(line)
            removed.setdefault(source_of(one["id"]), Counter())[_family(f"{one['stage']}/{one['reason']}")] += 1
    before = json.loads((folder / f"corpus/{BEFORE}/report.json").read_text())["passes"][0]["left"]
    passes = json.loads((folder / f"corpus/{AFTER}/report.json").read_text())["passes"]
    copies, after = passes[-2]["left"], passes[-1]["left"]
    rows = ["| source | documents | MB | " + " | ".join(FAMILIES) + " | lines, MB | documents left | MB left |"]
    rows.append("|---" + "|---:" * (len(FAMILIES) + 5) + "|")
    for source in sorted(before):
        gone = [removed.get(source, Counter())[family] for family in FAMILIES]
        rows.append(_row(source, before[source], gone, copies.get(source, [0, 0]), after.get(source, [0, 0])))
    totals = [[sum(column) for column in zip(*each.values(), strict=True)] for each in (before, copies, after)]
    gone = [sum(one[family] for one in removed.values()) for family in FAMILIES]
    rows.append(_row("all", totals[0], gone, totals[1], totals[2]))
    return "\n".join(rows)


def _row(name: str, before: list[int], gone: list[int], copies: list[int], after: list[int]) -> str:
    cells = [name, f"{before[0]:,}", f"{before[1] / 1e6:.1f}", *(f"{count:,}" for count in gone)]
    cells += [f"{(copies[1] - after[1]) / 1e6:.1f}", f"{after[0]:,}", f"{after[1] / 1e6:.1f}"]
    return f"| {' | '.join(cells)} |"


def _family(reason: str) -> str:
    return next(name for name, beginnings in FAMILIES.items() if reason.startswith(beginnings))


def _loss_table(folder: Path) -> str:
    """Held-out bits a byte of the two models, each the mean over the seeds, on raw and on cleaned text."""
    facts = json.loads((folder / "text/facts.json").read_text())
    runs = {state: [losses(path) for path in sorted((folder / "runs").glob(f"{state}-*"))] for state in (BEFORE, AFTER)}
    rows = [
        "| source | tokens before | after | held out | raw text: before | after | held out, cleaned | cleaned text: before | after |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    all_columns: list[list[float]] = [[], [], [], []]
    for source in sorted({key.split()[1] for key in facts}):
        cells = [source, *(_tokens(folder, state, source) for state in (BEFORE, AFTER))]
        column = 0
        for text in (BEFORE, AFTER):
            cells.append(f"{facts.get(f'{text} {source}', {}).get('held_documents', 0):,}")
            for model in (BEFORE, AFTER):
                found = [run.get(f"{text}_{source.replace('-', '_')}") for run in runs[model]]
                values = [bits_per_byte(folder, text, source, loss) for loss in found if loss is not None]
                if values:
                    all_columns[column].append(fmean(values))
                cells.append(f"{fmean(values):.3f} ± {max(values) - min(values):.3f}" if values else "")
                column += 1
        rows.append(f"| {' | '.join(cells)} |")
    means = [f"{fmean(values):.3f}" for values in all_columns]
    rows.append(f"| mean | | | | {means[0]} | {means[1]} | | {means[2]} | {means[3]} |")
    return "\n".join(rows)


def _tokens(folder: Path, state: str, source: str) -> str:
    path = folder / f"stores/train-{state}/{source}/store.json"
    return f"{json.loads(path.read_text())['splits']['train']['tokens'] / 1e6:.1f} M" if path.exists() else ""
