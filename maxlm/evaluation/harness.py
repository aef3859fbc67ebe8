"""The door of lm-evaluation-harness (extra `[eval]`): a model class for it, registered as `maxlm`.

`python -m maxlm.evaluation.harness run --model maxlm --model_args path=runs/mine --tasks ...` takes its command line as it is.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from maxlm.base.errors import UserError, show
from maxlm.base.installing import install_command
from maxlm.config.table import weights_kinds
from maxlm.evaluation.language_model import LanguageModel
from maxlm.evaluation.opening import open_model
from maxlm.evaluation.requests import Request
from maxlm.hardware.topologies import either

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    print(f"maxlm: lm-evaluation-harness cannot be imported ({error}): {install_command('eval')}.", file=sys.stderr)
    sys.exit(2)

OF_HARNESS = ("batch_size", "max_batch_size", "device")
MAX_TOKENS = 256  # of a continuation, where a task says nothing
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of it, the first one counts


@register_model("maxlm")
class MaxLM(TemplateLM):
    """A run, an imported model or a Hugging Face folder as a model of the harness. Encoding of pairs is the harness's own."""

    def __init__(
        self,
        path: str,
        step: int | None = None,
        context: int | None = None,
        weights: str = "raw",
        special_tokens: str = "tokens",
        **settings: Any,
    ) -> None:
        """`weights`: raw, or ema for the moving average. `special_tokens`: those that a text holds are tokens, as with the harness's own
        models, or text. `settings`: such as `mesh.tensor=2`, and those that the harness adds (OF_HARNESS), which have no effect here.

        Raises UserError, also for any other setting.
        """
        super().__init__()
        if weights not in weights_kinds():
            raise UserError(f"weights={show(weights)} is no kind of weights: use {either(weights_kinds())}.")
        if special_tokens not in ("tokens", "text"):
            raise UserError(f"special_tokens={show(special_tokens)} is neither tokens nor text.")
        if unknown := [name for name in settings if "." not in name and name not in OF_HARNESS]:
            known = "path, step, context, weights, special_tokens, mesh.* and precision.*"
            raise UserError(f"{show(unknown[0])} is no argument of maxlm: it takes {known}.")
        overrides = [f"{name}={value}" for name, value in settings.items() if "." in name]
        self.model: LanguageModel = open_model(Path(str(path)), overrides, step=step, context=context, kind=weights).model
        self.model.special = special_tokens == "tokens"

    @property
    def eot_token_id(self) -> int:
        """Id that ends a document."""
        return self.model.tokenizer.end_of_document_id

    @property
    def prefix_token_id(self) -> int:
        """Id before a text without context."""
        return self.model.prefix

    @property
    def max_length(self) -> int:
        """Tokens that are read together."""
        return self.model.scorer.context

    @property
    def tokenizer_name(self) -> str:
        """Hash of the tokenizer, by which the harness names its caches."""
        return self.model.tokenizer.hash

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of `string`, after those that open every text of the model, unless the harness asks for none or they are written."""
        nothing = not string and not self.model.tokenizer.frame.opening
        return list(self.model.encode(string) if add_special_tokens is False or nothing else self.model.encode_prompt(string))

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Raises UserError for any."""
        return _refuse_chat() if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Raises UserError."""
        _refuse_chat()

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any) -> list[tuple[float, bool]]:
        scores = self.model.score([Request(tuple(context), tuple(continuation)) for _, context, continuation in requests])
        self._note_cuts()
        found = [(score.logprob, score.greedy) for score in scores]
        for request, score in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], score)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows that overlap by one token, as the harness has it."""
        texts = [request.args[0] for request in requests]
        whole = [Request((self.model.prefix,), tuple(self.tok_encode(text))) for text in texts]
        scores = self.model.score(whole, stride=self.max_length)
        self._note_cuts()
        for text, score in zip(texts, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), score.logprob)
        return [score.logprob for score in scores]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The most likely continuations. Raises UserError for any others."""
        groups: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(_options(request.args[1]), []).append(index)
        texts = [""] * len(requests)
        for (tokens, stop), members in groups.items():
            made = self.model.generate([requests[index].args[0] for index in members], tokens, stop)
            for index, text in zip(members, made, strict=True):
                texts[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        self._note_cuts()
        return texts

    def _note_cuts(self) -> None:
        """Print how many requests have lost the beginning of their contexts since the last note."""
        cut, self.model.truncated = self.model.truncated, {"requests": 0, "tokens": 0}
        if cut["requests"]:
            line = f"{cut['requests']:,} requests are longer than the context; {cut['tokens']:,} tokens were cut off the left."
            print(f"maxlm: {line}", file=sys.stderr)


def _refuse_chat() -> NoReturn:
    raise UserError("chat templates are not applied by this model class: leave --apply_chat_template out.")


def _options(options: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
    """(most new tokens, stop strings) of a request."""
    if options.get("do_sample") or _number(options, "temperature", 0) > 0:
        raise UserError(f"generation with {options}: this model class continues greedily only; set do_sample: false and temperature: 0.")
    if changed := [name for name in ("num_beams", "repetition_penalty") if _number(options, name, 1) != 1]:
        raise UserError(
            f"generation with {changed[0]}: {show(options[changed[0]])}: this model class continues greedily only; set it to 1."
        )
    stop = options.get("until") or ()
    limit = next((name for name in LIMITS if options.get(name) is not None), LIMITS[0])
    return int(_number(options, limit, MAX_TOKENS)), (stop,) if isinstance(stop, str) else tuple(stop)


def _number(options: dict[str, Any], name: str, default: float) -> float:
    """Parse an option, which may be written as text. Raises UserError."""
    value = default if options.get(name) is None else options[name]
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"generation with {name}: {show(value)}: must be a number.") from None


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except UserError as error:
        print(f"maxlm: {error}", file=sys.stderr)
        sys.exit(2)
