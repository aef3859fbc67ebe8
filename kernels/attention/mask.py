"""Attention masks: which keys a query attends to. One value that kernels, context parallelism and FLOP counting all read."""

from dataclasses import dataclass
from typing import Literal, get_args

from jaxtyping import Array, Int

Form = Literal["causal", "bidirectional", "prefix"]


@dataclass(frozen=True)
class Mask:
    """Which keys a query attends to.

    form: "causal": keys at its own position and before; "bidirectional": all keys; "prefix" (arXiv 1910.10683, section 3.2.1): as causal,
    and every key of the prefix.
    window: only keys fewer than `window` positions away, None for any distance.
    documents: only keys of its own document (equal segment ids). Padding, segment id 0, is never attended to either way.
    """

    form: Form = "causal"
    window: int | None = None
    documents: bool = True

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise ValueError(f"Mask: form {self.form!r} is unknown: use one of {', '.join(get_args(Form))}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"Mask: a window of {self.window} hides every key: use 1 or more, or None")

    def attended_pairs(self, seq_len: int, prefix_len: int = 0) -> int:
        """(query, key) pairs that the mask leaves in a sequence of one document, of which the first `prefix_len` tokens are the prefix."""
        both_ways = {"causal": 0, "bidirectional": seq_len, "prefix": prefix_len}[self.form]  # tokens that attend to later ones among them
        return self._causal_pairs(seq_len) + self._causal_pairs(both_ways) - both_ways

    def _causal_pairs(self, seq_len: int) -> int:
        reach = seq_len if self.window is None else min(self.window, seq_len)
        return reach * (reach + 1) // 2 + (seq_len - reach) * reach

    def segments(self, ids: Int[Array, "B S"]) -> Int[Array, "B S"]:
        """Segment ids by which kernels tell documents and padding apart."""
        return ids if self.documents else ids.clip(max=1)

    def window_within(self, tokens: int) -> int | None:
        """The window, but no longer than `tokens`, all that a query may look back on: kernels add to it in int32, where more would wrap."""
        return None if self.window is None else min(self.window, tokens)

    def unsupported_by(self, name: str, *forms: Form) -> str:
        """Why an implementation that has only these forms cannot apply the mask; empty if it can."""
        return "" if self.form in forms else f"{name} has {' and '.join(forms)} masks only, not {self.form} ones"


CAUSAL = Mask()
