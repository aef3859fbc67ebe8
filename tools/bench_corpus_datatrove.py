"""The part of bench_corpus.py that datatrove runs: `PYTHON tools/bench_corpus_datatrove.py '[PATH, FOLDER, "regex" or "spacy", MINHASH]'`.

One task in this process: JsonlReader, C4, Gopher and FineWeb filters at the published thresholds, JsonlWriter, MinHash signatures. A first
run on a few documents loads what is loaded late. Prints JSON: CPU seconds, documents and documents kept.
"""

import json
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import C4QualityFilter, FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.word_tokenizers import WordTokenizer
from loguru import logger

WORD, SENTENCE = re.compile(r"\w+|[^\w\s]"), re.compile(r"[^.!?]+[.!?]*")


class RegexTokenizer(WordTokenizer):
    """Words and sentences by regular expressions: a custom tokenizer, as datatrove takes one in place of a language."""

    def word_tokenize(self, text: str) -> list[str]:
        return WORD.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        return [part for part in SENTENCE.findall(text) if not part.isspace()]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return [match.span() for match in SENTENCE.finditer(text)]


def run(path: str, folder: Path, words: str, minhash: dict[str, int], limit: int) -> tuple[int, int]:
    """Documents read and kept. `limit`: -1 for all."""
    language: Any = RegexTokenizer() if words == "regex" else "eng"
    config = MinhashConfig(n_grams=minhash["ngram"], num_buckets=minhash["bands"], hashes_per_bucket=minhash["rows"])
    reader = JsonlReader(str(Path(path).parent), glob_pattern=Path(path).name, compression="zstd", limit=limit)
    writer = JsonlWriter(str(folder / "documents"), compression="zstd")
    steps = [
        reader,
        C4QualityFilter(min_num_sentences=3, min_words_per_line=5, language=language),
        GopherQualityFilter(language=language),
        GopherRepetitionFilter(language=language),
        FineWebQualityFilter(char_duplicates_ratio=0.1, language=language),
        writer,
        MinhashDedupSignature(str(folder / "signatures"), config=config, language=language),
    ]
    stats = LocalPipelineExecutor(pipeline=steps, tasks=1, workers=1, logging_dir=str(folder / "logs")).run()
    read, written = stats.stats[0].stats, stats.stats[steps.index(writer)].stats
    return int(read["documents"].total), int(written["total"].total)


def main(path: str, folder: str, words: str, minhash: dict[str, int]) -> None:
    """Measure and print."""
    logger.remove()
    run(path, Path(folder) / "first", words, minhash, 5)
    begin = time.process_time()
    documents, kept = run(path, Path(folder) / "whole", words, minhash, -1)
    cpu = time.process_time() - begin
    print(json.dumps({"cpu": cpu, "documents": documents, "kept": kept, "version": version("datatrove")}))


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
