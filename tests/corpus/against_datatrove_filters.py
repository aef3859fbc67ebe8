"""Verdicts of `filters.rules: fineweb` and of `rules: papers` against verdicts of datatrove's filters, on real text.

python tests/corpus/against_datatrove_filters.py PYTHON TEXTS.jsonl...   PYTHON has datatrove 0.10.1 with spaCy; prints the table
python tests/corpus/against_datatrove_filters.py PYTHON --record         writes tests/cases/corpus/datatrove_verdicts.jsonl again
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from maxlm.corpus.document import Document, Removed
from maxlm.corpus.filters import FilterSettings, build_filters
from maxlm.corpus.filters.released import SENTENCE
from maxlm.corpus.filters.statistics import TextStatistics

SECTIONS: dict[str, dict[str, object]] = {  # name of a comparison -> sections of `filters`
    "gopher_repetition": {"gopher_repetition": {}},
    "gopher_quality": {"gopher_quality": {}},
    "c4": {"c4": {}},
    "c4 with terminal marks": {"c4": {"terminal_punctuation": True}},
    "fineweb": {"fineweb": {}},
}
RECORDED = Path(__file__).parents[1] / "cases/corpus/datatrove_verdicts.jsonl"


def words_of(text: str) -> list[str]:
    """Words and signs by our tokenizer of the released rules."""
    _, starts_W, lengths_W, _ = TextStatistics(text).pieces
    return [text[start : start + length] for start, length in zip(starts_W.tolist(), lengths_W.tolist(), strict=True)]


def by_ours(texts: Sequence[str], rules: str) -> list[dict[str, bool]]:
    """Verdict of each filter alone: True where the document stays."""
    filters = {name: build_filters(FilterSettings.model_validate({"rules": rules, **section})) for name, section in SECTIONS.items()}
    return [{name: not isinstance(each(Document("", text, {})), Removed) for name, (each,) in filters.items()} for text in texts]


def by_datatrove(python: str, texts: Sequence[str], tokenizer: str) -> list[dict[str, bool]]:
    """Verdicts of datatrove's filters, with our words (`own`) or with its own (`default`)."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "texts.jsonl", Path(folder) / "verdicts.jsonl"
        source.write_text("".join(json.dumps({"text": text, "words": words_of(text)}) + "\n" for text in texts))
        script = Path(__file__).with_name("filters_by_datatrove.py")
        subprocess.run([python, script, source, out, SENTENCE.pattern, tokenizer], check=True, env={})
        return [json.loads(line) for line in out.read_text().splitlines()]


def table(python: str, texts: Sequence[str]) -> str:
    """Agreement by filter, in Markdown."""
    released, papers = by_ours(texts, "fineweb"), by_ours(texts, "papers")
    own, default = (by_datatrove(python, texts, tokenizer) for tokenizer in ("own", "default"))
    lines = ["| filter | documents | kept by datatrove | `fineweb`, same words | `fineweb`, spaCy's words | `papers`, spaCy's words |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for name in SECTIONS:
        shares = [
            sum(ours[name] == theirs[name] for ours, theirs in zip(*pair, strict=True)) / len(texts)
            for pair in ((released, own), (released, default), (papers, default))
        ]
        kept = sum(one[name] for one in default) / len(texts)
        lines.append(f"| {name} | {len(texts):,} | {kept:.1%} | {' | '.join(f'{share:.2%}' for share in shares)} |")
    return "\n".join(lines)


def record(python: str) -> None:
    """Record datatrove's verdicts, with our words, on the texts of the fixture."""
    texts = [json.loads(line)["text"] for line in RECORDED.read_text("utf-8").splitlines()]
    verdicts = by_datatrove(python, texts, "own")
    rows = [json.dumps({"text": text, "kept": kept}) for text, kept in zip(texts, verdicts, strict=True)]
    RECORDED.write_text("\n".join(rows) + "\n", "utf-8")


if __name__ == "__main__":
    if sys.argv[2:] == ["--record"]:
        record(sys.argv[1])
    else:
        print(
            table(sys.argv[1], [json.loads(line)["text"] for path in sys.argv[2:] for line in Path(path).read_text("utf-8").splitlines()])
        )
