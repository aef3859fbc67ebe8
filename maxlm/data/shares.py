"""Shares of the sources of a run, planned and consumed, and the documents of a batch, for `maxlm data inspect`."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from maxlm.base.errors import printable
from maxlm.data.input_pipeline import Pipeline
from maxlm.data.order import PADDING, SampleOrder, batch_number, counts_at
from maxlm.data.selection import Metadata, has_metadata
from maxlm.data.token_store import TokenStore

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
