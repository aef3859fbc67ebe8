"""Contents of a token store: counts, document lengths and samples, for `maxlm data inspect`."""

import json
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from maxlm.base.errors import printable
from maxlm.data import marks
from maxlm.data.manifest import SPLITS
from maxlm.data.selection import Metadata, has_metadata, values_line
from maxlm.data.token_store import TokenStore
from maxlm.data.tokenizer import Tokenizer, open_tokenizer

MEASURED = 2**22  # documents measured, at most
SAMPLE_TOKENS = 64
LENGTHS = {"min": 0, "p10": 10, "p50": 50, "p90": 90, "p99": 99, "max": 100}  # name -> percentile


def describe(store_path: str, samples: int = 2) -> dict[str, Any]:
    """Counts, document lengths and the decoded beginnings of `samples` documents a split, as JSON types.

    Raises UserError: the store is missing, unfinished, foreign or damaged.
    """
    stores = {split: TokenStore(store_path, split) for split in SPLITS}
    info, path = stores["train"].info, stores["train"].path
    tokenizer = open_tokenizer(path)
    return {
        "store": path,
        "content": info.content,
        **info.model_dump(include={"format", "tokenizer_hash", "vocab_size", "end_of_document_id", "dtype", "fingerprint", "settings"}),
        "splits": {split: _split(store, tokenizer, samples) for split, store in stores.items()},
    }


def render(description: dict[str, Any]) -> RenderableType:
    """The result of `describe` as tables, and its samples."""
    facts = Table("", Column(overflow="fold"), title=description["store"], show_header=False, box=None, title_justify="left")
    for name in ("content", "format", "dtype", "vocab_size", "end_of_document_id", "tokenizer_hash", "fingerprint"):
        facts.add_row(name, str(description[name]))
    splits = description["splits"]
    sizes = Table("", *(Column(split, justify="right") for split in splits), box=SIMPLE_HEAD)
    for name in ("tokens", "bytes", "documents"):
        sizes.add_row(name, *(f"{summary[name]:,}" for summary in splits.values()))
    sizes.add_row("documents measured", *(f"{summary['documents_measured']:,}" for summary in splits.values()), end_section=True)
    for name in (*LENGTHS, "mean"):
        lengths = [summary.get("document_tokens", {}).get(name) for summary in splits.values()]
        sizes.add_row(f"tokens a document, {name}", *("" if length is None else f"{length:,}" for length in lengths))
    tables = []
    for split, summary in splits.items():
        columns = ("metadata", "kind", Column("documents", justify="right"), Column("values", overflow="fold"))
        table = Table(*columns, box=SIMPLE_HEAD, title=f"{split} metadata", title_justify="left")
        for name, field in summary.get("metadata", {}).items():
            table.add_row(name, field["kind"], f"{field['documents']:,}", values_line(field))
        tables += [table] if summary.get("metadata") else []
    samples = [Text(_sample_line(split, sample)) for split, summary in splits.items() for sample in summary["samples"]]
    return Group(facts, sizes, *tables, *samples)


def _sample_line(split: str, sample: dict[str, Any]) -> str:
    """A sample with the name of its document, where the store keeps it, and of a conversation the text that counts."""
    name = f" ({printable(sample['metadata']['id'])})" if "metadata" in sample else ""
    text, counted = (printable(json.dumps(sample.get(key), ensure_ascii=False)) for key in ("text", "counted"))
    line = f"{split} document {sample['document']:,}{name}, {sample['tokens']:,} tokens: {text}"
    return f"{line}; {sample['tokens_counted']:,} of its tokens count: {counted}" if "counted" in sample else line


def _split(store: TokenStore, tokenizer: Tokenizer, samples: int) -> dict[str, Any]:
    """Summary of one split, with lengths of its first MEASURED documents."""
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
            **{name: int(np.percentile(lengths, percent, method="nearest")) for name, percent in LENGTHS.items()},
            "mean": round(float(lengths.mean()), 1),
        }
    known = Metadata(store) if documents and has_metadata(store) else None
    if known is not None:
        summary["metadata"] = known.summary(MEASURED)
    chosen = np.unique(np.linspace(0, documents - 1, min(samples, documents), dtype=np.int64))
    summary["samples"] = [
        {**_beginning(store, tokenizer, int(document)), **({} if known is None else {"metadata": known.row(int(document))})}
        for document in chosen
    ]
    return summary


def _beginning(store: TokenStore, tokenizer: Tokenizer, document: int) -> dict[str, Any]:
    start, stop = (int(offset) for offset in store.read_documents(document, document + 2))
    text = tokenizer.decode(store.read(start, min(stop, start + SAMPLE_TOKENS)))
    sample = {"document": document, "tokens": stop - start, "text": text}
    if store.info.content == "text":
        return sample
    (marked,) = store.read_marked([(start, stop)])
    counted = marked[(marked & marks.COUNTS) != 0] & marks.IDS
    return {**sample, "tokens_counted": len(counted), "counted": tokenizer.decode(counted[:SAMPLE_TOKENS])}
