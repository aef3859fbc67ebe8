"""Ends of generated texts, and the special tokens that end the assistant's turns in stores of conversations."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from maxlm.data import marks
from maxlm.data.token_store import TokenStore
from maxlm.data.tokenizer import Tokenizer, open_tokenizer


class Stops:
    """Find the end of a continuation, other than the end of the document: at an id that the model ends texts with, or before a stop text.

    A stop text that is a special token stands for its id, since decoded texts hold none of them.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        special = [text for text in stop if text in tokenizer.special]
        known = tokenizer.ids if special else {}
        self._ids = {*tokenizer.frame.ends, *(known[text] for text in special)}
        self._texts = tuple(text for text in stop if text and text not in tokenizer.special)  # "" is in every text

    def __bool__(self) -> bool:
        """True if anything ends a continuation."""
        return bool(self._ids or self._texts)

    def finished(self, ids: Sequence[int]) -> bool:
        """True if a continuation, or the beginning of one, has come to an end."""
        if not self._ids.isdisjoint(ids):
            return True
        text = self._tokenizer.decode(ids) if self._texts else ""
        return any(stop in text for stop in self._texts)

    def text(self, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
        """A continuation as text, up to the first end in it. It is decoded together with its `prompt`: the decoders of some tokenizers
        leave out a space that a text begins with.
        """
        end = next((at for at, token in enumerate(ids) if token in self._ids), len(ids))
        before, whole = (self._tokenizer.decode(part) for part in (prompt, [*prompt, *ids[:end]]))
        text = whole[len(before) :] if whole.startswith(before) else self._tokenizer.decode(ids[:end])
        return text[: min((text.find(stop) for stop in self._texts if stop in text), default=len(text))]


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
