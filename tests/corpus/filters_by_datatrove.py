"""Verdicts of datatrove's filters, for a comparison: run by an interpreter that has datatrove 0.10.1 with spaCy.

    python filters_by_datatrove.py TEXTS.jsonl OUT.jsonl SENTENCE own|default

TEXTS.jsonl: {"text", "words"} a line. OUT.jsonl: {filter: kept} a line. `own`: a text is split into `words`, and a line into
sentences by the regular expression SENTENCE; `default`: by spaCy, as datatrove does for English.
"""

import json
import re
import sys
from pathlib import Path


def main() -> None:
    """Each filter alone, with its defaults; C4's also as FineWeb ran it, without the rule of terminal marks."""
    texts, out, sentence, tokenizer = sys.argv[1:]
    from datatrove.data import Document
    from datatrove.pipeline.filters import C4QualityFilter, FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter
    from datatrove.utils.word_tokenizers import WordTokenizer

    known: dict[str, list[str]] = {}

    class Words(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return known[text]

        def sent_tokenize(self, text: str) -> list[str]:
            return re.findall(sentence, text)

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            return [match.span() for match in re.finditer(sentence, text)]

    language = Words() if tokenizer == "own" else "eng"
    filters = {
        "gopher_repetition": GopherRepetitionFilter(language=language),
        "gopher_quality": GopherQualityFilter(language=language),
        "c4": C4QualityFilter(filter_no_terminal_punct=False, language=language),
        "c4 with terminal marks": C4QualityFilter(language=language),
        "fineweb": FineWebQualityFilter(language=language),
    }
    with Path(texts).open(encoding="utf-8") as source, Path(out).open("w") as target:
        for line in source:
            record = json.loads(line)
            known = {record["text"]: record["words"]}
            kept = {}
            for name, each in filters.items():
                result = each.filter(Document(text=record["text"], id=""))
                kept[name] = bool(result if isinstance(result, bool) else result[0])
            target.write(json.dumps(kept) + "\n")


if __name__ == "__main__":
    main()
