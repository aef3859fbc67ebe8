"""Tokenize on all cores: worker processes, with results in the order of the documents."""

import collections
import hashlib
import itertools
import multiprocessing
import os
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import numpy as np

from maxlm.config.errors import UserError
from maxlm.data.readers import Document
from maxlm.data.tokenizer import Tokenizer
from maxlm.data.workers import end_with_parent, workers_without_signals

BATCH_CHARS = 2**20  # of text in a batch for a worker
QUEUED = 3  # batches a worker


class Encoded(NamedTuple):
    """Tokens of a batch of documents."""

    documents: list[np.ndarray]  # ids of each document, ending with the end-of-document token
    held_out: list[bool]  # True for documents of the eval split
    bytes_read: int  # of the sources, up to and including the last document


def is_held_out(text: str, fraction: float) -> bool:
    """True if a document belongs to the eval split, by a hash of its text: copies never end up in both splits."""
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    return number < fraction * 2**64


def encode_in_order(documents: Iterable[Document], tokenizer: Tokenizer, eval_fraction: float, workers: int) -> Generator[Encoded]:
    """Tokenize documents, on `workers` processes if more than one. The result does not depend on their number."""
    batches = _batches(documents)
    if workers == 1:
        _prepare_worker(tokenizer.text, tokenizer.end_of_document)
        for batch in batches:
            yield Encoded(*_encode([document.text for document in batch], eval_fraction), batch[-1].bytes_read)
        return
    # Spawned, not forked: a fork copies the locks of threads (tensorstore's, jax's) that do not exist in the child.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (tokenizer.text, tokenizer.end_of_document))
    pending: collections.deque[tuple[Future[tuple[list[np.ndarray], list[bool]]], list[Document]]] = collections.deque()
    try:
        while True:
            for batch in itertools.islice(batches, workers * QUEUED - len(pending)):
                with workers_without_signals():
                    pending.append((pool.submit(_encode, [document.text for document in batch], eval_fraction), batch))
            if not pending:
                break
            future, batch = pending.popleft()
            yield Encoded(*future.result(), batch[-1].bytes_read)
    except BrokenProcessPool as error:
        rule = "a tokenizing process died, usually out of memory"
        raise UserError(f"data.prepare.workers = {workers}: {rule}; use fewer, and run the same command again to continue.") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(documents: Iterable[Document]) -> Generator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_worker_tokenizer: list[Tokenizer] = []  # one, sent at the start of the process and not with every batch


def _prepare_worker(text: str, end_of_document: str) -> None:
    _worker_tokenizer[:] = [Tokenizer(text, end_of_document, "the tokenizer")]


def _start_worker(text: str, end_of_document: str) -> None:
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _prepare_worker(text, end_of_document)


def _encode(texts: list[str], eval_fraction: float) -> tuple[list[np.ndarray], list[bool]]:
    return _worker_tokenizer[0].encode_documents(texts), [is_held_out(text, eval_fraction) for text in texts]
