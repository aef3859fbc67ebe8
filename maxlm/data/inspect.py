"""Tables of `maxlm data inspect`: the contents of a token store, and the sources of a run.

Of a store: counts, document lengths and samples. Of a run: the shares of its sources, planned and consumed, and the documents of a batch.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from maxlm.base.errors import printable
from maxlm.data import marks
from maxlm.data.input_pipeline import Pipeline
from maxlm.data.manifest import SPLITS
from maxlm.data.order import PADDING, SampleOrder, batch_number, counts_at
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


NAMED = ("url", "source", "licence", "license", "language")  # fields of a document that a line shows


def describe_shares(pipeline: Pipeline, steps: int, done: int) -> dict[str, Any]:
    """Samples of every source in a run of `steps` updates, of which `done` are done, as JSON types. Tokens include padding."""
    plan, S = pipeline.plan, pipeline.seq_len
    assert plan is not None, "held-out data have no plan"
    total = _samples_before(pipeline, steps)
    planned, consumed = (_counts(pipeline, step) for step in (steps, done))
    sources: dict[str, Any] = {}
    for number, source in enumerate(plan.sources):
        name = source.name
        windows, tokens = pipeline.sizes.get(name, (None, None))
        documents = pipeline.documents_of(name)
        sources[name] = {"documents": documents, "tokens": tokens, "windows": windows}
        for kind, counts in (("planned", planned), ("consumed", consumed)):
            count = counts.get(number, 0)
            sources[name][kind] = {
                "samples": count,
                "tokens": count * S,
                "share": count / max(sum(counts.values()), 1),
                "epochs": None if windows is None else count / windows,
            }
    ends = [*(stage.first for stage in plan.stages[1:]), total]
    stages = [
        {
            "from_token": stage.first * S,
            "to_token": min(end, total) * S,
            "shares": {plan.sources[number].name: share / sum(stage.shares.values()) for number, share in stage.shares.items()},
        }
        for stage, end in zip(plan.stages, ends, strict=True)
        if stage.first < total and stage.shares
    ]
    ended = plan.stages[-1].first if not plan.stages[-1].shares else None
    return {
        "steps": {"planned": steps, "consumed": done},
        "tokens": {"planned": sum(planned.values()) * S, "consumed": sum(consumed.values()) * S},
        "ends_at_token": None if ended is None or ended >= total else ended * S,
        "sources": sources,
        "stages": stages,
    }


def describe_batch(pipeline: Pipeline, step: int, rows: int | None = None) -> dict[str, Any]:
    """Sources of the samples of update `step`, counted from 1, as JSON types. `rows`: the first rows alone; None: all."""
    batch = batch_number(step - 1, pipeline.left_out)
    found = []
    for row, number in enumerate(pipeline.sample_ids(step - 1)[:rows].tolist()):
        source, window = pipeline.source_of(number) if number != PADDING else (None, None)
        documents = [] if source is None else list(_documents(source.store, pipeline.token_parts(number)))
        found.append({"row": row, "source": None if source is None else source.name, "window": window, "documents": documents})
    return {"step": step, "batch": batch, "rows": found}


def render_shares(described: dict[str, Any]) -> RenderableType:
    """The result of `describe_shares` as tables."""
    steps, tokens = described["steps"], described["tokens"]
    begun = steps["consumed"] > 0
    title = f"{steps['planned']:,} steps, {tokens['planned']:,} tokens planned"
    title += f"; {steps['consumed']:,} steps, {tokens['consumed']:,} tokens consumed" if begun else ""
    tables = []
    for part in ("planned", *(["consumed"] if begun else [])):
        columns = (Column(name, justify="right") for name in ("documents", "its tokens", f"{part} tokens", "share", "epochs"))
        tables.append(Table("source", *columns, box=SIMPLE_HEAD))
        for name, source in described["sources"].items():
            own = source[part]
            counts = ["" if value is None else f"{value:,}" for value in (source["documents"], source["tokens"], own["tokens"])]
            tables[-1].add_row(name, *counts, f"{own['share']:.2%}", "" if own["epochs"] is None else f"{own['epochs']:.2f}")
    stages = Table("stage", Column("from token", justify="right"), Column("to token", justify="right"), "shares", box=SIMPLE_HEAD)
    for number, stage in enumerate(described["stages"], start=1):
        shares = ", ".join(f"{name} {share:.2%}" for name, share in stage["shares"].items())
        stages.add_row(str(number), f"{stage['from_token']:,}", f"{stage['to_token']:,}", shares)
    ended = described["ends_at_token"]
    warning = (
        [] if ended is None else [Text(f"All sources have had their epochs at token {ended:,}: training would be refused.", "bold red")]
    )
    return Group(Text(title, "bold"), *tables, stages, *warning)


def render_batch(described: dict[str, Any]) -> RenderableType:
    """The result of `describe_batch`, a line for each document."""
    title = f"step {described['step']:,} (batch {described['batch']:,})"
    columns = (Column("row", justify="right"), "source", Column("tokens", justify="right"), Column("document", overflow="fold"))
    table = Table(*columns, box=SIMPLE_HEAD, title=title, title_justify="left")
    for row in described["rows"]:
        if not row["documents"]:
            table.add_row(str(row["row"]), "", "", "padding, or of a source that the config names no more")
        for document in row["documents"]:
            start, stop = document["tokens_of_row"]
            about = document.get("metadata", {})
            facts = [f"document {document['document']:,} of {document['store']} ({document['split']})"]
            facts += [f"{name}: {about[name]}" for name in NAMED if name in about]
            said = printable(("  " if about else "") + "  ".join(facts))
            text = Text(printable(str(about.get("id", ""))), "bold").append(said, "not bold")
            table.add_row(str(row["row"]), row["source"], f"{start:,}-{stop:,}", text)
    return table


def _samples_before(pipeline: Pipeline, step: int) -> int:
    """Samples until the end of `step` updates, with the batches that are left out."""
    return pipeline.end_sample(step - 1) if step else 0


def _counts(pipeline: Pipeline, step: int) -> dict[int, int]:
    """Samples of every source in the first `step` updates."""
    plan, end = pipeline.plan, _samples_before(pipeline, step)
    assert plan is not None, "checked by the caller"
    counts, order = counts_at(plan.stages, end), SampleOrder({}, plan.stages, seed=0, shuffle=False)
    for batch in pipeline.left_out:
        first, after = pipeline.batch_sizes.before(batch), pipeline.batch_sizes.before(batch + 1)
        for source, _ in order.places(range(first, after)) if first < end else ():
            counts[source] -= 1
    return counts


def _documents(store: TokenStore, parts: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Documents of a row with the tokens `parts` of the store, without its last target."""
    known = Metadata(store) if has_metadata(store) else None
    left, place = sum(stop - start for start, stop in parts) - 1, 0
    for start, stop in parts:
        stop = min(stop, start + left)
        if start >= stop:
            return
        first, last = store.document_at(start), store.document_at(stop - 1)
        offsets = store.read_documents(first, last + 2).astype(int).tolist()
        for document, (begin, end) in enumerate(itertools.pairwise(offsets), start=first):
            count = min(end, stop) - max(begin, start)
            about = {} if known is None else {"metadata": known.row(document)}
            place_of_row = [place, place + count]
            yield {"store": store.path, "split": store.split, "document": document, "tokens_of_row": place_of_row, **about}
            place, left = place + count, left - count
