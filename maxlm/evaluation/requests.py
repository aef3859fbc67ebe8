"""Likelihood requests, and the windows of tokens in which they fit a model's context."""

from collections.abc import Sequence
from typing import NamedTuple

from maxlm.base.errors import UserError

Ids = tuple[int, ...]


class Request(NamedTuple):
    """Tokens to score, given the tokens before them."""

    context: Ids  # not empty: where nothing comes before, the token that opens a document
    continuation: Ids


class Score(NamedTuple):
    """Log-likelihood of a request's continuation."""

    logprob: float  # nats, summed in float64
    greedy: bool  # no token of it is less likely than another in its place


class Window(NamedTuple):
    """Tokens that the model reads together. The last `scored` tokens are scored; the last of all is only a target."""

    tokens: Ids
    scored: int
    request: int  # index of its request, of which it scores tokens from `offset` on
    offset: int

    @property
    def inputs(self) -> int:
        """Tokens that are read."""
        return len(self.tokens) - 1


def likelihood_window(request: Request, length: int, index: int = 0) -> tuple[Window, int]:
    """(the window of a request, tokens cut off the left of its context so that it reads at most `length`).

    Raises UserError if the continuation alone is longer.
    """
    tokens, scored = request.context + request.continuation, len(request.continuation)
    if scored > length:
        raise UserError(f"a continuation has {scored:,} tokens, above the context of {length:,}: score it as perplexity, or shorten it.")
    cut = max(len(tokens) - 1 - length, 0)
    return Window(tokens[cut:], scored, index, 0), cut


def rolling_windows(context: Ids, tokens: Ids, length: int, stride: int, index: int = 0) -> list[Window]:
    """Windows that score every one of `tokens` once. The first reads `context` and as many tokens as fit into `length`; each next one ends
    `stride` tokens further, or at the end, reads the `length` tokens before, and scores those that are new. A token after the first window
    so has at least `length - stride + 1` tokens of context.
    """
    if not 1 <= stride <= length:
        raise UserError(f"stride = {stride}: must be 1 to {length}, the tokens of the context; each window moves on by so many.")
    whole, before = context + tokens, len(context)
    windows: list[Window] = []
    done = 0
    while done < len(tokens):
        end = min(done + stride, len(tokens)) if windows else min(max(length + 1 - before, 1), len(tokens))
        stop = before + end
        windows.append(Window(whole[max(stop - length - 1, 0) : stop], end - done, index, done))
        done = end
    return windows


def distinct(requests: Sequence[Request]) -> tuple[list[Request], list[int]]:
    """(requests without repetition, for each of `requests` its index among them)."""
    index: dict[Request, int] = {}
    places = [index.setdefault(request, len(index)) for request in requests]
    return list(index), places
