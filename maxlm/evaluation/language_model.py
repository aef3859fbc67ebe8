"""A model to evaluate: its weights on a mesh, its tokenizer, and what tasks ask of it."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import maxlm
from maxlm.checkpoint.digest import digest
from maxlm.config.errors import UserError
from maxlm.data.stops import Stops
from maxlm.data.tokenizer import Tokenizer
from maxlm.evaluation.generating import continuations
from maxlm.evaluation.requests import Request, Window, distinct, likelihood_window, rolling_windows
from maxlm.evaluation.result_log import ResultLog, key_of
from maxlm.evaluation.scoring import Scorer
from maxlm.models import Parameters

PROMPTS = 16  # generated together


class Likelihood(NamedTuple):
    """Log-likelihood of a continuation in nats, and whether it is the most likely one, token by token."""

    logprob: float
    greedy: bool


def silent(done: int, total: int) -> None:
    """Show no progress."""


@dataclass
class LanguageModel:
    """The weights are used where they lie: there is no second copy of them."""

    scorer: Scorer
    params: Parameters
    model_state: Parameters
    tokenizer: Tokenizer
    special: bool = False  # special tokens written in a text are those tokens, and not text
    folder: Path | None = None  # of the results of finished requests; None: not resumable
    progress: Callable[[int, int], None] = silent
    truncated: dict[str, int] = field(default_factory=lambda: {"requests": 0, "tokens": 0})  # cut off contexts so far

    @cached_property
    def weights_digest(self) -> str:
        """Digest of the weights, equal on any mesh."""
        sums = digest({"params": self.params, "model_state": self.model_state})
        return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def prefix(self) -> int:
        """Id of the token before a text that nothing precedes."""
        return self.tokenizer.prefix

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text, without any token added."""
        ids = self.tokenizer.encode_rendered(text)[0] if self.special else self.tokenizer.encode(text)
        return tuple(ids.tolist())

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Ids of a prompt, after those that open every text of the model."""
        return tuple(self.tokenizer.opened(self.encode(text)))

    def request(self, context: str, continuation: str) -> Request:
        """Tokens of a continuation after a context, split as lm-evaluation-harness does (`TemplateLM._encode_pair`): spaces at the end of
        the context count as the beginning of the continuation, and both are encoded as one text. Where a token would span both, as in
        `f(x` and `)`, each is encoded alone.
        """
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        if not context:
            return Request((self.prefix,), self.encode(continuation))
        before, whole = self.encode(context), self.encode(context + continuation)
        after = whole[len(before) :] if whole[: len(before)] == before else self.encode(continuation)
        return Request(tuple(self.tokenizer.opened(before)), after)

    def score(self, requests: Sequence[Request], stride: int | None = None) -> list[Likelihood]:
        """Likelihoods of `requests`; equal ones are computed once. A request that is longer than the context loses the beginning of its
        own, which `truncated` counts. With a `stride` it is scored in rolling windows, and loses tokens only if what precedes it is longer.
        """
        unique, places = distinct(requests)
        made = [self._windows(request, stride, index) for index, request in enumerate(unique)]
        with self._log({"stride": stride}, unique) as log:
            log.known |= {index: {"logprob": 0.0, "greedy": True} for index, request in enumerate(unique) if not request.continuation}
            windows = [window for index, (of_request, _) in enumerate(made) if index not in log.known for window in of_request]
            before = len(log.known)

            def progress(done: int, total: int) -> None:
                self.progress(before + done, before + total)

            for index, score in self.scorer.score(self.params, self.model_state, windows, progress):
                if not math.isfinite(score.logprob):
                    raise UserError("a log-likelihood is not finite: weights are damaged, or too large for the precision of the matmuls.")
                log.append(index, {"logprob": score.logprob, "greedy": score.greedy})
            found = [Likelihood(log.known[place]["logprob"], log.known[place]["greedy"]) for place in places]
        self._count([made[place][1] for place in places])
        return found

    def _windows(self, request: Request, stride: int | None, index: int) -> tuple[list[Window], int]:
        length = self.scorer.context
        if stride is not None:
            return rolling_windows(*request, length, stride, index), max(len(request.context) - length, 0)
        window, cut = likelihood_window(request, length, index)
        return [window], cut

    def generate(self, prompts: Sequence[str], tokens: int, stop: Sequence[str]) -> list[str]:
        """The most likely continuation of each prompt, `tokens` at most, up to the first of the `stop` strings or the end of the document.

        A prompt that leaves no room in the context loses its beginning, which `truncated` counts.
        """
        room, stops = self._room(tokens), Stops(self.tokenizer, stop)
        requests = [Request(self.encode_prompt(prompt), ()) for prompt in prompts]
        cuts = [max(len(request.context) - room, 0) for request in requests]
        requests = [Request(request.context[cut:], ()) for request, cut in zip(requests, cuts, strict=True)]
        unique, places = distinct(requests)
        with self._log({"tokens": tokens, "stop": list(stop)}, unique) as log:
            missing = [index for index in range(len(unique)) if index not in log.known]
            for start in range(0, len(missing), PROMPTS):
                group = missing[start : start + PROMPTS]
                ids = [unique[index].context for index in group]
                end = self.tokenizer.end_of_document_id
                config, mesh = self.scorer.config, self.scorer.mesh
                made = continuations(config, mesh, self.params, self.model_state, ids, tokens, end, stops.finished)
                for index, new in zip(group, made, strict=True):
                    log.append(index, {"text": stops.text(new)})
                self.progress(len(log.known), len(unique))
            texts = [str(log.known[place]["text"]) for place in places]
        self._count(cuts)
        return texts

    def _room(self, tokens: int) -> int:
        """Tokens of a prompt that leave room for so many new ones. Raises UserError."""
        if tokens >= self.scorer.context:
            raise UserError(f"max_new_tokens = {tokens:,} leaves no room for a prompt in a context of {self.scorer.context:,} tokens.")
        return self.scorer.context - tokens

    def _count(self, cuts: Sequence[int]) -> None:
        self.truncated["requests"] += sum(cut > 0 for cut in cuts)
        self.truncated["tokens"] += sum(cuts)

    @contextmanager
    def _log(self, settings: dict[str, Any], requests: Sequence[Request]) -> Iterator[ResultLog]:
        path = None
        if self.folder is not None:
            config = self.scorer.config
            asked = {"weights": self.weights_digest, "context": self.scorer.context, "model": config.model.model_dump(mode="json")}
            asked |= {"precision": config.precision.model_dump(mode="json"), "maxlm": maxlm.__version__, **settings}
            asked |= {"tokenizer": self.tokenizer.hash, "ends": [self.tokenizer.end_of_document_id, *self.tokenizer.frame.ends]}
            path = self.folder / f"{key_of(asked, requests)}.jsonl"
        log = ResultLog(path)
        try:
            yield log
        finally:
            log.close()


class Rehearsal(LanguageModel):
    """Computes nothing: what a task asks is made and checked, and every answer is a constant."""

    def score(self, requests: Sequence[Request], stride: int | None = None) -> list[Likelihood]:
        for request in requests:
            self._windows(request, stride, 0)
        return [Likelihood(-1.0, False)] * len(requests)

    def generate(self, prompts: Sequence[str], tokens: int, stop: Sequence[str]) -> list[str]:
        self._room(tokens)
        return [""] * len(prompts)
