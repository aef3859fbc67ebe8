"""Ends of generated texts."""

from collections.abc import Sequence

from maxlm.data.tokenizer import Tokenizer


class Stops:
    """Where a continuation ends beside the end of the document: at an id that the model ends texts with, or before a stop text.

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
