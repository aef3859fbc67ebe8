"""Attention pairs that a mask leaves."""


def attended_pairs(seq_len: int, window: int | None = None) -> int:
    """(query, key) pairs that a causal mask, narrowed to `window` tokens, leaves in a sequence of one document."""
    reach = seq_len if window is None else min(window, seq_len)
    return reach * (reach + 1) // 2 + (seq_len - reach) * reach
