"""Tokens that end the assistant's turns in stores of conversations: with them a model that was trained on such a store ends its texts."""

from collections.abc import Iterable, Iterator

import numpy as np

from maxlm.data import marks
from maxlm.data.token_store import TokenStore
from maxlm.data.tokenizer import Tokenizer, open_tokenizer

PLACES, DOCUMENTS = 16, 64  # of a store: places spread over it, and documents that are read at each


def turn_ends(stores: Iterable[str]) -> tuple[int, ...]:
    """Ids of special tokens that end turns which count in the loss, other than the end of a document; () for stores of texts.

    Up to 1,024 documents of each store are read. Raises UserError as `TokenStore`.
    """
    found: set[int] = set()
    for path in stores:
        store = TokenStore(path)
        if store.info.content == "text":
            continue
        tokenizer = open_tokenizer(path)
        ids = tokenizer.ids
        special = {ids[token] for token in tokenizer.special}
        for span in _counted(store):
            if (end := _end(span, special, tokenizer)) is not None and end != store.info.end_of_document_id:
                found.add(end)
    return tuple(sorted(found))


def _counted(store: TokenStore) -> Iterator[np.ndarray]:
    """Ids of runs of tokens that count, none across segments."""
    n_documents = store.size.documents
    starts = dict.fromkeys(int(start) for start in np.linspace(0, max(0, n_documents - DOCUMENTS), PLACES))
    for start in starts if n_documents else ():
        offsets = store.read_documents(start, min(start + DOCUMENTS, n_documents) + 1)
        marked = store.read_marked([(int(offsets[0]), int(offsets[-1]))])[0]
        counts = (marked & marks.COUNTS) != 0
        begins = counts & np.append(True, ~counts[:-1] | ((marked[1:] & marks.STARTS) != 0))
        ends = counts & np.append(~counts[1:] | ((marked[1:] & marks.STARTS) != 0), True)
        for first, last in zip(np.flatnonzero(begins), np.flatnonzero(ends), strict=True):
            yield marked[first : last + 1] & marks.IDS


def _end(span: np.ndarray, special: set[int], tokenizer: Tokenizer) -> int | None:
    """The special token that ends a turn, behind which a template may write white space."""
    for at in range(len(span) - 1, -1, -1):
        if int(span[at]) in special:
            return int(span[at])
        if tokenizer.decode(span[at : at + 1]).strip():
            return None
    return None
