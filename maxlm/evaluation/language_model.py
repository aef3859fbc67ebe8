"""A model to evaluate: its weights on a mesh, its tokenizer, and what tasks ask of it."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import maxlm
from maxlm.base.atomic import AppendFile
from maxlm.base.errors import UserError
from maxlm.base.strict_json import dumps, read_objects
from maxlm.checkpoint.digest import digest
from maxlm.config.schema import ModelConfig, PrecisionConfig
from maxlm.data.stops import Stops
from maxlm.data.tokenizer import Tokenizer
from maxlm.evaluation.requests import Request, Window, distinct, likelihood_window, rolling_windows
from maxlm.evaluation.scoring import Scorer
from maxlm.inference.generate import Sampler, batch_rows, cache_slots, continue_ids, prepare
from maxlm.models import Parameters
from maxlm.training.fits import Part, check_generation

PROMPTS = 16  # generated together, at least: the devices that split a batch divide the number


class Likelihood(NamedTuple):
    """Log-likelihood of a continuation in nats, and whether it is the most likely one, token by token."""

    logprob: float
    greedy: bool


def silent(done: int, total: int) -> None:
    """Show no progress."""


@dataclass
class LanguageModel:
    """Likelihoods use the weights where they lie; generation makes a copy of them, which is gone when it ends."""

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
        return tuple(self.tokenizer.encode(text, special=self.special).tolist())

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Ids of a prompt, after those that open every text of the model."""
        return tuple(self.tokenizer.opened(self.encode(text)))

    def request(self, context: str, continuation: str) -> Request:
        """Tokens of a continuation after a context, as `Tokenizer.encode_pair`, after spaces at the end of the context have become the
        beginning of the continuation: the convention of lm-evaluation-harness (`TemplateLM._encode_pair`).
        """
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        if not context:
            return Request((self.prefix,), self.encode(continuation))
        before, after = self.tokenizer.encode_pair(context, continuation, special=self.special)
        return Request(tuple(self.tokenizer.opened(before.tolist())), tuple(after.tolist()))

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
        stops = Stops(self.tokenizer, stop)
        requests, cuts = self._prompts(prompts, tokens)
        unique, places = distinct(requests)
        with self._log({"tokens": tokens, "stop": list(stop)}, unique) as log:
            missing = [index for index in range(len(unique)) if index not in log.known]
            model, precision = self.scorer.config.model, self.scorer.config.precision
            greedy = Greedy(model, precision, self.scorer.mesh, self.params, self.model_state) if missing else None
            for start in range(0, len(missing), self._together):
                assert greedy is not None, "some are missing"
                group = missing[start : start + self._together]
                ids = [unique[index].context for index in group]
                made = greedy.continuations(ids, tokens, self.tokenizer.end_of_document_id, stops.finished)
                for index, new in zip(group, made, strict=True):
                    log.append(index, {"text": stops.text(new)})
                self.progress(len(log.known), len(unique))
            texts = [str(log.known[place]["text"]) for place in places]
        self._count(cuts)
        return texts

    def _prompts(self, prompts: Sequence[str], tokens: int) -> tuple[list[Request], list[int]]:
        """(requests of these prompts, with room for so many new tokens, and how many tokens each has lost). Raises UserError."""
        if tokens >= self.scorer.context:
            raise UserError(f"max_new_tokens = {tokens:,} leaves no room for a prompt in a context of {self.scorer.context:,} tokens.")
        room = self.scorer.context - tokens
        whole = [self.encode_prompt(prompt) for prompt in prompts]
        cuts = [max(len(ids) - room, 0) for ids in whole]
        return [Request(ids[cut:], ()) for ids, cut in zip(whole, cuts, strict=True)], cuts

    @property
    def _together(self) -> int:
        """Prompts that are generated together."""
        return -(-PROMPTS // self.scorer.shards) * self.scorer.shards

    def _count(self, cuts: Sequence[int]) -> None:
        self.truncated["requests"] += sum(cut > 0 for cut in cuts)
        self.truncated["tokens"] += sum(cuts)

    @contextmanager
    def _log(self, settings: dict[str, Any], requests: Sequence[Request]) -> Iterator["ResultLog"]:
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


@dataclass
class Rehearsal(LanguageModel):
    """Computes nothing: what a task asks is made and checked, and every answer is a constant."""

    held: Part | None = None  # memory that devices hold during generation; None: memory is not checked
    asked: list[str] = field(default_factory=list)  # a digest of each call

    def score(self, requests: Sequence[Request], stride: int | None = None) -> list[Likelihood]:
        for request in requests:
            self._windows(request, stride, 0)
        self.asked.append(key_of({"stride": stride}, requests))
        return [Likelihood(-1.0, False)] * len(requests)

    def generate(self, prompts: Sequence[str], tokens: int, stop: Sequence[str]) -> list[str]:
        requests, _ = self._prompts(prompts, tokens)
        self.asked.append(key_of({"tokens": tokens, "stop": list(stop)}, requests))
        unique, _ = distinct(requests)
        if self.held is not None and unique:
            longest = max(len(request.context) for request in unique)
            slots = (min(self._together, len(unique)), longest, tokens)
            check_memory(self.scorer.config.model, self.scorer.config.precision, self.scorer.mesh, self.held, *slots)
        return [""] * len(prompts)


class Greedy:
    """Generates with a copy of the weights, which lives as long as this does."""

    def __init__(self, model: ModelConfig, precision: PrecisionConfig, mesh: Mesh, params: Parameters, model_state: Parameters) -> None:
        self._mesh = mesh
        with jax.set_mesh(mesh):
            self._prepared = prepare(model, params, model_state, precision)

    def continuations(
        self, prompts: Sequence[tuple[int, ...]], tokens: int, end_of_document: int, finished: Callable[[list[int]], bool]
    ) -> list[list[int]]:
        """The most likely continuation of each prompt, token by token: at most `tokens` ids, up to the end of the document; it may end as
        soon as it is `finished`.
        """
        with jax.set_mesh(self._mesh):
            sampler = Sampler(max_new_tokens=tokens, temperature=0.0)
            return continue_ids(self._prepared, list(map(list, prompts)), sampler, end_of_document, finished)


def check_memory(model: ModelConfig, precision: PrecisionConfig, mesh: Mesh, held: Part, prompts: int, longest: int, tokens: int) -> None:
    """Raise UserError if a device cannot generate `tokens` for so many prompts of `longest` tokens in the memory that `held` leaves."""
    with jax.set_mesh(mesh):
        slots, rows = cache_slots(longest, tokens), batch_rows(prompts)
    check_generation(model, slots, rows, dict(mesh.shape), precision.compute, held)


class ResultLog:
    """One file a set of requests and weights: a JSON line a finished request. A line that a kill has torn counts as missing."""

    def __init__(self, path: Path | None) -> None:
        """`path`: of the file; None keeps nothing."""
        self.known: dict[int, dict[str, Any]] = {}
        self._file = None if path is None else AppendFile(path)
        if path is not None and path.is_file():
            for item in read_objects(path):
                if isinstance(item.get("request"), int) and None not in item.values():
                    self.known[item["request"]] = item

    def append(self, request: int, values: Mapping[str, Any]) -> None:
        """Add the result of a request. Raises OSError."""
        self.known[request] = dict(values)
        if self._file is not None:  # the newline comes first: it ends the remains of a torn line
            self._file.append(b"\n" + dumps({"request": request, **values}).encode())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def key_of(settings: Mapping[str, Any], requests: Sequence[Request]) -> str:
    """Digest of requests, in their order, and of all that their results depend on."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for request in requests:
        digest.update(np.array([len(request.context), len(request.continuation)], np.int64).tobytes())
        digest.update(np.array(request.context + request.continuation, np.int64).tobytes())
    return digest.hexdigest()[:32]
