"""Tokenize on all cores: worker processes, with results in the order of the documents."""

import collections
import contextlib
import hashlib
import itertools
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Literal, NamedTuple, Protocol

import numpy as np

from maxlm.base.errors import UserError
from maxlm.config.workers import end_with_parent, workers_without_signals
from maxlm.data.metadata import About
from maxlm.data.sources import Document
from maxlm.data.tokenizer import Tokenizer

BATCH_CHARS = 2**20  # of text in a batch for a worker
QUEUED = 3  # batches a worker
NOTHING = About("", {})


class Note(NamedTuple):
    """A document that is left out, with its place and the reason; or special tokens in it that are encoded as text; or parts of it
    that the chat template does not write.
    """

    kind: Literal["bad_rows", "too_long", "special_tokens", "unwritten"]
    text: str


class Encoded(NamedTuple):
    """Tokens of a batch of documents."""

    documents: Sequence[np.ndarray | None]  # ids of each, ending with the end-of-document token; None for one that is left out
    held_out: list[bool]  # True for documents of the eval split
    notes: Sequence[Note | None]
    abouts: list[About]
    bytes_read: int  # of the sources, up to and including the last document


class Encode(Protocol):
    """Documents -> ids of each, None for one that is left out; the bytes of which the hash chooses its split (`is_held_out`); notes."""

    def __call__(self, documents: list[Document]) -> tuple[Sequence[np.ndarray | None], Sequence[bytes], Sequence[Note | None]]: ...
    def close(self) -> None:
        """Close open files and end processes that the encoder uses."""


Encoder = Callable[[], Encode]  # sent once to every process that encodes


class TextEncoder:
    """Tokenizes texts."""

    def __init__(self, text: str, end_of_document: str) -> None:
        """`text`: of the tokenizer.json."""
        self._tokenizer = Tokenizer(text, end_of_document, "the tokenizer")

    def __call__(self, documents: list[Document]) -> tuple[list[np.ndarray], list[bytes], list[Note | None]]:
        texts = [document.text for document in documents]
        return self._tokenizer.encode_documents(texts), [text.encode() for text in texts], [None] * len(texts)

    def close(self) -> None:
        """Nothing is held."""


def is_held_out(content: bytes, fraction: float) -> bool:
    """True if a document belongs to the eval split, by a hash of its content: copies never end up in both splits."""
    number = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
    return number < fraction * 2**64


def encode_in_order(documents: Iterable[Document], encoder: Encoder, eval_fraction: float, workers: int) -> Generator[Encoded]:
    """Encode documents, on `workers` processes if more than one. The result does not depend on their number."""
    batches = _batches(documents)
    if workers == 1:
        with contextlib.closing(encoder()) as encode:
            _worker_encode[:] = [encode]
            for batch in batches:
                yield Encoded(*_encode(batch, eval_fraction), [document.about for document in batch], batch[-1].bytes_read)
        return
    # Spawned, not forked: a fork copies the locks of threads (tensorstore's, jax's) that do not exist in the child.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (encoder,))
    pending: collections.deque[tuple[Future[_Result], list[Document]]] = collections.deque()
    try:
        while True:
            for batch in itertools.islice(batches, workers * QUEUED - len(pending)):
                with workers_without_signals():
                    texts = [document._replace(about=NOTHING) for document in batch]  # a process needs no metadata
                    pending.append((pool.submit(_encode, texts, eval_fraction), batch))
            if not pending:
                break
            future, batch = pending.popleft()
            yield Encoded(*future.result(), [document.about for document in batch], batch[-1].bytes_read)
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


_Result = tuple[Sequence[np.ndarray | None], list[bool], Sequence[Note | None]]
_worker_encode: list[Encode] = []  # one, made at the start of the process and not with every batch


def _start_worker(encoder: Encoder) -> None:
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker_encode[:] = [encoder()]


def _encode(batch: list[Document], eval_fraction: float) -> _Result:
    ids, contents, notes = _worker_encode[0](batch)
    return ids, [is_held_out(content, eval_fraction) for content in contents], notes
