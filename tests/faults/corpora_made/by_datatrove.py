"""Clusters of near copies by datatrove's MinHash, for a comparison: run by an interpreter that has datatrove 0.10.1.

    python by_datatrove.py TEXTS.jsonl OUT.json FOLDER NGRAM BANDS ROWS

TEXTS.jsonl: a text a line, words with single spaces between them. OUT.json: seconds, and a number for each text; equal ones are a cluster.
Words are told apart by a regular expression, where datatrove asks for spaCy.
"""

import json
import struct
import sys
import time
from pathlib import Path


def main() -> None:
    """Three of datatrove's four steps; the fourth only removes documents."""
    texts, out, folder, ngram, bands, rows = sys.argv[1:]
    from datatrove.data import Document
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.utils.hashing import HashConfig
    from datatrove.utils.logging import logger
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Words(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        def sent_tokenize(self, text: str) -> list[str]:
            return [text]

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            return [(0, len(text))]

    logger.remove()
    config = MinhashConfig(int(ngram), int(bands), int(rows), hash_config=HashConfig(precision=64))
    lines = Path(texts).read_text("utf-8").splitlines()
    documents = [Document(text=json.loads(line), id=str(number)) for number, line in enumerate(lines)]
    began = time.monotonic()
    base = Path(folder)
    MinhashDedupSignature(str(base / "signatures"), config, language=Words()).run(iter(documents))
    buckets = MinhashDedupBuckets(str(base / "signatures"), str(base / "buckets"), config=config)
    for rank in range(config.num_buckets):
        buckets.run(None, rank, config.num_buckets)
    MinhashDedupCluster(str(base / "buckets"), str(base / "clusters"), config, save_cluster_id=True).run(None)
    seconds = time.monotonic() - began
    number = list(range(-1, -1 - len(documents), -1))
    for path in (base / "clusters").glob("*.clusters"):
        for document, cluster in struct.iter_unpack("<2I", path.read_bytes()):
            number[document] = cluster
    Path(out).write_text(json.dumps({"seconds": seconds, "clusters": number}))


if __name__ == "__main__":
    main()
