"""What is in a token store, for `maxlm data inspect`."""

import json
from typing import Any

import numpy as np

from maxlm.data import manifest
from maxlm.data.manifest import SPLITS
from maxlm.data.store import TokenStore
from maxlm.data.tokenizer import Tokenizer, read_tokenizer_json

MEASURED = 2**22  # document lengths read at most
SAMPLE_TOKENS = 64
PERCENTILES = (10, 50, 90, 99)


def describe(store_path: str, samples: int = 2) -> dict[str, Any]:
    """Counts, document lengths and decoded beginnings of `samples` documents a split; nothing JSON cannot hold.

    Raises:
        UserError: the store is missing, unfinished, foreign or damaged.
    """
    stores = {split: TokenStore.open(store_path, split) for split in SPLITS}
    info, path = stores["train"].info, stores["train"].path
    end = info.settings.get("data.prepare.tokenizer.end_of_document", "")
    tokenizer = Tokenizer(read_tokenizer_json(f"{path}/{manifest.TOKENIZER}"), end, f"{path}/{manifest.TOKENIZER}")
    return {
        "store": path,
        **info.model_dump(include={"format", "tokenizer_hash", "vocab_size", "end_of_document_id", "dtype", "fingerprint", "settings"}),
        "splits": {split: _split(store, tokenizer, samples) for split, store in stores.items()},
    }


def as_text(description: dict[str, Any]) -> str:
    """What `describe` found, for a person to read."""
    facts = ("format", "dtype", "vocab_size", "end_of_document_id", "tokenizer_hash", "fingerprint")
    lines = [description["store"], *(f"  {name:<20}{description[name]}" for name in facts)]
    for split, summary in description["splits"].items():
        lines.append(f"{split}: {summary['tokens']:,} tokens ({summary['bytes']:,} bytes) in {summary['documents']:,} documents")
        if lengths := summary.get("document_tokens"):
            partial = "" if summary["documents_measured"] == summary["documents"] else f" (of the first {summary['documents_measured']:,})"
            lines.append(f"  tokens a document{partial}: " + "  ".join(f"{name} {value:,}" for name, value in lengths.items()))
        for sample in summary["samples"]:
            lines.append(
                f"  document {sample['document']:,}, {sample['tokens']:,} tokens: {json.dumps(sample['text'], ensure_ascii=False)}"
            )
    return "\n".join(lines)


def _split(store: TokenStore, tokenizer: Tokenizer, samples: int) -> dict[str, Any]:
    """One split; lengths are of its first MEASURED documents."""
    documents = store.size.documents
    measured = min(documents, MEASURED)
    summary: dict[str, Any] = {
        "tokens": store.n_tokens,
        "bytes": store.n_tokens * np.dtype(store.info.dtype).itemsize,
        "documents": documents,
        "documents_measured": measured,
    }
    if documents:
        lengths = np.diff(store.read_documents(0, measured + 1).astype(np.int64))
        summary["document_tokens"] = {
            "min": int(lengths.min()),
            **{f"p{percent}": int(np.percentile(lengths, percent, method="nearest")) for percent in PERCENTILES},
            "max": int(lengths.max()),
            "mean": round(float(lengths.mean()), 1),
        }
    chosen = np.unique(np.linspace(0, documents - 1, min(samples, documents), dtype=np.int64))
    summary["samples"] = [_beginning(store, tokenizer, int(document)) for document in chosen]
    return summary


def _beginning(store: TokenStore, tokenizer: Tokenizer, document: int) -> dict[str, Any]:
    start, stop = (int(offset) for offset in store.read_documents(document, document + 2))
    text = tokenizer.decode(store.read(start, min(stop, start + SAMPLE_TOKENS)))
    return {"document": document, "tokens": stop - start, "text": text}
