"""A model to evaluate: its weights on a mesh, its tokenizer, and what tasks ask of it."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from maxlm.checkpoint.digest import digest
from maxlm.config.errors import UserError
from maxlm.config.schema import Config
from maxlm.data.tokenizer import Tokenizer
from maxlm.evaluation.generating import continuations
from maxlm.evaluation.requests import Request, Window, distinct, likelihood_window, rolling_windows
from maxlm.evaluation.result_log import ResultLog, key_of
from maxlm.evaluation.scoring import BATCH_TOKENS, Progress, Scorer
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

    config: Config
    mesh: Mesh
    params: Parameters
    model_state: Parameters
    tokenizer: Tokenizer
    prefix: int  # token before a text that nothing precedes
    context: int | None = None  # tokens that are read together; None: as trained
    batch_tokens: int = BATCH_TOKENS
    folder: Path | None = None  # of the results of finished requests; None: not resumable
    progress: Callable[[int, int], None] = silent
    truncated: dict[str, int] = field(default_factory=lambda: {"requests": 0, "tokens": 0})  # cut off contexts so far

    @cached_property
    def scorer(self) -> Scorer:
        return Scorer(self.config, self.mesh, context=self.context, batch_tokens=self.batch_tokens)

    @cached_property
    def weights_digest(self) -> str:
        """Digest of the weights, equal on any mesh."""
        sums = digest({"params": self.params, "model_state": self.model_state})
        return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:32]

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text, without any token added."""
        return tuple(self.tokenizer.encode(text).tolist())

    def request(self, context: str, continuation: str) -> Request:
        """Tokens of a continuation after a context, split as lm-evaluation-harness does (`TemplateLM._encode_pair`): spaces at the end of
        the context count as the beginning of the continuation, and both are encoded as one text.
        """
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        if not context:
            return Request((self.prefix,), self.encode(continuation))
        before = self.encode(context)
        return Request(before, self.encode(context + continuation)[len(before) :])

    def score(self, requests: Sequence[Request], stride: int | None = None) -> list[Likelihood]:
        """Likelihoods of `requests`; equal ones are computed once. A request that is longer than the context loses the beginning of its
        own, which `truncated` counts; with a `stride` it is scored in rolling windows instead.
        """
        unique, places = distinct(requests)
        cuts: dict[int, int] = {}
        with self._log({"stride": stride}, unique) as log:
            windows: list[Window] = []
            for index, request in enumerate(unique):
                made, cut = self._windows(request, stride, index)
                if cut:
                    cuts[index] = cut
                if not request.continuation:
                    log.known[index] = {"logprob": 0.0, "greedy": True}
                windows += made if index not in log.known else []
            before = sum(index in log.known for index in range(len(unique)))
            progress: Progress = lambda done, total: self.progress(before + done, before + total)  # noqa: E731
            for index, score in self.scorer.score(self.params, self.model_state, windows, progress):
                log.append(index, {"logprob": score.logprob, "greedy": score.greedy})
            found = [Likelihood(log.known[place]["logprob"], log.known[place]["greedy"]) for place in places]
        self.truncated["requests"] += sum(place in cuts for place in places)
        self.truncated["tokens"] += sum(cuts.get(place, 0) for place in places)
        return found

    def _windows(self, request: Request, stride: int | None, index: int) -> tuple[list[Window], int]:
        length = self.scorer.context
        if stride is not None:
            return rolling_windows(*request, length, stride, index), 0
        window, cut = likelihood_window(request, length, index)
        return [window], cut

    def generate(self, prompts: Sequence[str], tokens: int, stop: Sequence[str]) -> list[str]:
        """The most likely continuation of each prompt, `tokens` at most, up to the first of the `stop` strings or the end of the document.

        A prompt that leaves no room in the context loses its beginning, which `truncated` counts.
        """
        room = self.scorer.context - tokens
        if room < 1:
            raise UserError(f"max_new_tokens = {tokens:,} leaves no room for a prompt in a context of {self.scorer.context:,} tokens.")

        def finished(ids: list[int]) -> bool:
            return any(end in self.tokenizer.decode(ids) for end in stop)

        requests = [Request(self.encode(prompt) or (self.prefix,), ()) for prompt in prompts]
        cuts = [max(len(request.context) - room, 0) for request in requests]
        requests = [Request(request.context[cut:], ()) for request, cut in zip(requests, cuts, strict=True)]
        unique, places = distinct(requests)
        with self._log({"tokens": tokens, "stop": list(stop)}, unique) as log:
            missing = [index for index in range(len(unique)) if index not in log.known]
            for start in range(0, len(missing), PROMPTS):
                group = missing[start : start + PROMPTS]
                ids = [unique[index].context for index in group]
                end = self.tokenizer.end_of_document_id
                made = continuations(self.config, self.mesh, self.params, self.model_state, ids, tokens, end, finished)
                for index, new in zip(group, made, strict=True):
                    log.append(index, {"text": _until(self.tokenizer.decode(new), stop)})
                self.progress(len(log.known), len(unique))
            texts = [str(log.known[place]["text"]) for place in places]
        self.truncated["requests"] += sum(cut > 0 for cut in cuts)
        self.truncated["tokens"] += sum(cuts)
        return texts

    @contextmanager
    def _log(self, settings: dict[str, Any], requests: Sequence[Request]) -> Iterator[ResultLog]:
        path = None
        if self.folder is not None:
            asked = {"weights": self.weights_digest, "context": self.scorer.context, "model": self.config.model.model_dump(mode="json")}
            asked |= {"precision": self.config.precision.model_dump(mode="json"), **settings}
            path = self.folder / f"{key_of(asked, requests)}.jsonl"
        log = ResultLog(path)
        try:
            yield log
        finally:
            log.close()


def _until(text: str, stop: Sequence[str]) -> str:
    """`text` before the first of the stop strings."""
    return text[: min((at for at in (text.find(end) for end in stop) if at >= 0), default=len(text))]
