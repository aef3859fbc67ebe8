"""`maxlm.Model`: the weights of a run, of an imported model or of a Hugging Face folder, ready to use."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, overload

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from maxlm.api.errors import plain_errors
from maxlm.api.process import quiet_process
from maxlm.base.errors import UserError
from maxlm.base.paths import user_path
from maxlm.config.schema import Config
from maxlm.data.tokenizer import Tokenizer
from maxlm.evaluation.language_model import LanguageModel
from maxlm.evaluation.opening import OpenedWeights, open_weights
from maxlm.evaluation.requests import Request
from maxlm.evaluation.scoring import Scorer
from maxlm.inference.forward import Forward, LanguageModule
from maxlm.inference.sampling import Sampler
from maxlm.inference.text import Asked, continue_asked
from maxlm.models import Parameters, count_parameters
from maxlm.training.saved_run import TOKENIZER

Prompt = str | Mapping[str, Any]
Tokens = str | Sequence[int] | Sequence[Sequence[int]] | np.ndarray | Array


class Score(NamedTuple):
    """Likelihood of a text."""

    logprob: float  # nats, summed over its tokens
    tokens: int
    bytes: int  # of the text in UTF-8
    greedy: bool  # no other token was more likely at any place

    @property
    def loss(self) -> float:
        """Nats a token."""
        return -self.logprob / max(self.tokens, 1)

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte of the text, which compares models with different tokenizers."""
        return -self.logprob / float(np.log(2)) / max(self.bytes, 1)


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A language model: its weights on devices, its config and its tokenizer. Made by `Model.load`, `Run.model` or `Program.model`."""

    config: Config
    mesh: Mesh
    parameters: Parameters  # nested dicts of arrays, float32
    model_state: Parameters = field(default_factory=dict)  # not learned by gradient, such as balancing biases of experts
    tokenizer: Tokenizer | None = None  # None: it reads ids only
    step: int | None = None  # updates of its checkpoint; None for a published model
    notes: tuple[str, ...] = ()  # sentences on what an import left out
    folder: Path | None = None  # of the run

    @classmethod
    @plain_errors
    def load(
        cls,
        place: str | os.PathLike[str],
        *overrides: str,
        step: int | None = None,
        weights: str = "raw",
        context: int | None = None,
    ) -> "Model":
        """Load a model.

        Args:
            place: the folder of a run or of an imported model, or a Hugging Face folder.
            overrides: settings of mesh and precision, such as "mesh.fsdp=8" or "precision.compute=bfloat16".
            step: of a run, the checkpoint; None: the newest.
            weights: of a run, "raw" or the name of an average that it keeps, such as "ema".
            context: tokens that `score` reads together; None: as many as in training.

        Raises UserError: there is no model, no such checkpoint, or a setting is wrong.
        """
        with quiet_process():
            found = open_weights(user_path(os.fspath(place)), overrides, step=step, context=context, kind=weights)
        return cls._opened(found)

    @classmethod
    def _opened(cls, found: OpenedWeights) -> "Model":
        return cls(found.config, found.mesh, found.params, found.model_state, found.tokenizer, found.step, found.notes, found.folder)

    @plain_errors
    def logits(self, tokens: Tokens) -> Float[Array, "... S V"]:
        """Logits of the next token after each of `tokens`, in float32.

        Args:
            tokens: a text, ids [S], or rows of ids of equal length [B, S]; each row is a document by itself.
        """
        ids = np.asarray(self.encode(tokens) if isinstance(tokens, str) else tokens)
        if ids.ndim not in (1, 2) or ids.dtype.kind not in "iu":
            raise UserError("tokens are a text, ids [S], or rows of ids of equal length [B, S].")
        rows = self._forward(self.parameters, self.model_state, np.atleast_2d(ids))
        return rows if ids.ndim == 2 else rows[0]

    @overload
    def score(self, texts: str, contexts: str | None = None) -> Score: ...  # type: ignore[overload-overlap]  # a text is a sequence, too
    @overload
    def score(self, texts: Sequence[str], contexts: Sequence[str] | None = None) -> list[Score]: ...
    @plain_errors
    def score(self, texts: str | Sequence[str], contexts: str | Sequence[str] | None = None) -> Score | list[Score]:
        """Likelihood of each text, after its context if there are contexts. A text that is longer than the context of the model is read in
        windows that overlap by half; after a context it must fit.
        """
        if isinstance(texts, str):
            if not (contexts is None or isinstance(contexts, str)):
                raise UserError("one text has one context: give two strings, or two lists.")
            return self.score([texts], None if contexts is None else [contexts])[0]
        if isinstance(contexts, str) or (contexts is not None and len(contexts) != len(texts)):
            raise UserError("give a context for each text: two lists of the same length.")
        model = self._language_model
        requests = (
            [Request((model.prefix,), model.encode(text)) for text in texts]
            if contexts is None
            else [model.request(context, text) for context, text in zip(contexts, texts, strict=True)]
        )
        found = model.score(requests, stride=max(model.scorer.context // 2, 1) if contexts is None else None)
        sizes = zip(found, requests, texts, strict=True)
        return [Score(one.logprob, len(request.continuation), len(text.encode()), one.greedy) for one, request, text in sizes]

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence, too
        self,
        prompts: str,
        tokens: int = ...,
        *,
        temperature: float = ...,
        top_k: int = ...,
        top_p: float = ...,
        min_p: float = ...,
        repetition_penalty: float = ...,
        stop: Sequence[str] = ...,
        seed: int = ...,
        dtype: str = ...,
        chat: bool = ...,
        special_tokens: bool = ...,
    ) -> str: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        tokens: int = ...,
        *,
        temperature: float = ...,
        top_k: int = ...,
        top_p: float = ...,
        min_p: float = ...,
        repetition_penalty: float = ...,
        stop: Sequence[str] = ...,
        seed: int = ...,
        dtype: str = ...,
        chat: bool = ...,
        special_tokens: bool = ...,
    ) -> list[str]: ...
    @plain_errors
    def generate(
        self,
        prompts: str | Sequence[Prompt],
        tokens: int = 64,
        *,
        temperature: float = 0.8,
        top_k: int = 50,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: Sequence[str] = (),
        seed: int = 0,
        dtype: str = "float32",
        chat: bool = False,
        special_tokens: bool = False,
    ) -> str | list[str]:
        """Continue prompts, as `maxlm generate` does; returns the continuations alone.

        Args:
            prompts: a text or several; with `chat` user messages, or mappings with `messages`.
            tokens: new tokens at most.
            temperature: 0 takes the most likely token each time.
            top_k: sample among this many; 0: all.
            top_p: sample among the most likely that together have this probability.
            min_p: sample among those with this share of the largest probability.
            repetition_penalty: divide the logits of tokens that are there already by this.
            stop: texts before which a continuation ends.
            seed: of the sampling.
            dtype: "float32" or "bfloat16", of matrices, activations and caches.
            chat: render prompts with the model's chat template.
            special_tokens: special tokens in prompts are those tokens, not text.
        """
        sampler = Sampler(tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, tuple(stop))
        listed: list[Any] = [prompts] if isinstance(prompts, str) else [one if isinstance(one, str) else dict(one) for one in prompts]
        if not listed:
            return []
        asked = Asked(listed, sampler, dtype, chat, special_tokens)
        weights = lambda: (self.parameters, self.model_state)  # noqa: E731
        folder = None if self.folder is None else self.folder / TOKENIZER
        found = continue_asked(self.config.model, self.config.data.seq_len, self.mesh, weights, self._text(), asked, folder)
        return found[0] if isinstance(prompts, str) else found

    @plain_errors
    def encode(self, text: str) -> list[int]:
        """Ids of a text, without any token added."""
        ids: list[int] = self._text().encode(text).tolist()
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ids."""
        return self._text().decode(np.asarray(ids).tolist())

    def module(self) -> LanguageModule:
        """A flax.nnx module with these weights: `module(tokens)` is the logits. It shares its arrays with `parameters`."""
        return LanguageModule(self.config, self.mesh, self.parameters, self.model_state)

    @plain_errors
    def with_parameters(self, parameters: Parameters | Callable[[Parameters], Parameters]) -> "Model":
        """This model with other parameters, or with `parameters(a copy of the tree)`. Raises UserError if their names or shapes differ."""
        given = parameters(jax.tree.map(lambda leaf: leaf, self.parameters)) if callable(parameters) else parameters
        ours, theirs = (dict(jax.tree_util.tree_flatten_with_path(tree)[0]) for tree in (self.parameters, given))
        for path in (*ours, *theirs):
            before, now = (getattr(tree.get(path), "shape", None) for tree in (ours, theirs))
            if before != now:
                raise UserError(f"parameters{jax.tree_util.keystr(path)} has the shape {now}, and the model has {before}.")
        placed = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding).astype(old.dtype), given, self.parameters)
        return replace(self, parameters=placed)

    @property
    def size(self) -> int:
        """Number of parameters."""
        return count_parameters(self.config.model)

    def __repr__(self) -> str:
        at = "" if self.step is None else f", step {self.step:,}"
        return f"Model({self.config.run.name if self.folder is None else str(self.folder)!r}, {self.size:,} parameters{at})"

    @cached_property
    def _forward(self) -> Forward:
        return Forward(self.config, self.mesh)

    @cached_property
    def _language_model(self) -> LanguageModel:
        scorer = Scorer(self.config, self.mesh, context=self.config.data.seq_len)
        return LanguageModel(scorer, self.parameters, self.model_state, self._text())

    def _text(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError("this model has no tokenizer, without which no text can be read: give ids to `logits`.")
        return self.tokenizer
