"""Tokens a second of the batch pipeline on one core, from a token store.

    taskset -c 0 python tools/bench_data.py [--tokens 20000000] [--batch-tokens 65536] [--seconds 5]

Writes a store of random documents (half of them under 700 tokens) into a temporary folder, then makes shuffled numpy batches
of it, one after another, without prefetching: ids, reads, segments, positions, weights. `first` is the first epoch, in which
every chunk is read from the file and checked; `then` has them in TensorStore's cache. Exit code 1 if either is below 5 M tokens/s
on the cores it may use; on more than one core the result is not a claim and says so.
"""

import os
import tempfile
import time

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from maxlm.config.schema import DataConfig
from maxlm.data import manifest
from maxlm.data.input_pipeline import Pipeline
from maxlm.data.manifest import SplitInfo, StoreInfo
from maxlm.data.writer import SplitWriter

VOCAB = 32_000
GOAL = 5e6  # tokens/s
SEQ_LENS = (512, 2048)


def write_store(path: str, tokens: int) -> None:
    """A store of about `tokens` random tokens in documents of log-normal length."""
    rng = np.random.default_rng(0)
    writer = SplitWriter(path, "train", np.dtype(np.uint16))
    while writer.info.tokens < tokens:
        for length in rng.lognormal(6.5, 1.2, 1000).astype(int) + 1:
            writer.add(np.append(rng.integers(1, VOCAB, length), 0))
    writer.finish()
    empty = SplitWriter(path, "eval", np.dtype(np.uint16))
    empty.finish()
    splits: dict[manifest.Split, SplitInfo] = {"train": writer.info, "eval": empty.info}
    info = StoreInfo(
        tokenizer_hash="none", vocab_size=VOCAB, end_of_document_id=0, dtype="uint16", fingerprint="none", settings={}, splits=splits
    )
    manifest.save(path, info)


def measure(path: str, seq_len: int, batch_tokens: int, seconds: float) -> tuple[float, float]:
    """Tokens/s of the first epoch, and after it."""
    config = DataConfig(store=path, seq_len=seq_len)
    pipeline = Pipeline(config, global_batch=batch_tokens // seq_len, seed=0, vocab_size=VOCAB)

    def speed(start: int, stop: int | None) -> float:
        begin, step = time.perf_counter(), start
        while step != stop and (time.perf_counter() - begin < seconds or stop is not None):
            pipeline.host_batch(step)
            step += 1
        return (step - start) * pipeline.global_batch * seq_len / (time.perf_counter() - begin)

    first_epoch = pipeline.n_windows // pipeline.global_batch
    return speed(0, first_epoch), speed(first_epoch, None)


def main(tokens: int = 20_000_000, batch_tokens: int = 65_536, seconds: float = 5.0) -> None:
    """Measure batches of a store of random documents, for so many seconds each; exit with 1 if one is below the goal."""
    cores = len(os.sched_getaffinity(0))
    title = f"{tokens:,} tokens, batches of {batch_tokens:,}, {cores} core{'s' if cores > 1 else ''}"
    table = Table("seq_len", "first, M tokens/s", "then, M tokens/s", "of the goal of 5", title=title)
    slowest = float("inf")
    with tempfile.TemporaryDirectory() as path:
        write_store(path, tokens)
        for seq_len in SEQ_LENS:
            first, then = measure(path, seq_len, batch_tokens, seconds)
            slowest = min(slowest, first, then)
            table.add_row(str(seq_len), f"{first / 1e6:.1f}", f"{then / 1e6:.1f}", f"{min(first, then) / GOAL:.1f}x")
    Console().print(table)
    if cores > 1:
        print(f"on {cores} cores this is no claim about one: run it under taskset -c 0")
    raise typer.Exit(1 if slowest < GOAL else 0)


if __name__ == "__main__":
    typer.run(main)
