"""Run a task on a model."""

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from maxlm.base.errors import UserError, error_kind
from maxlm.base.paths import read_file
from maxlm.data.token_store import TokenStore
from maxlm.evaluation import template
from maxlm.evaluation.language_model import LanguageModel, Rehearsal
from maxlm.evaluation.prompts import Prompts
from maxlm.evaluation.requests import Request
from maxlm.evaluation.results import SEED, Figure, Result, standard_error
from maxlm.evaluation.task import ExactMatchTask, MultipleChoiceTask, PerplexityTask, Task
from maxlm.training.fits import Part

MOST_TEXT = 2**30  # bytes of a file that is one text

TOGETHER = 2**20  # tokens of documents that are scored together


def run_task(task: Task, model: LanguageModel) -> Result:
    """Evaluate `model` on a task. Raises UserError naming the item that is wrong."""
    before = dict(model.truncated)
    if isinstance(task.config, PerplexityTask):
        n, figures = _perplexity(task, task.config, model)
    elif isinstance(task.config, MultipleChoiceTask):
        n, figures = _multiple_choice(task, task.config, model)
    else:
        n, figures = _exact_match(task, task.config, model)
    cut = (model.truncated[name] - before[name] for name in ("requests", "tokens"))
    return Result(task.name, task.config.kind, n, figures, settings_of(task, model), *cut)


def settings_of(task: Task, model: LanguageModel) -> dict[str, Any]:
    """All that the figures of a task depend on."""
    return {
        "context": model.scorer.context,
        "precision": model.scorer.config.precision.model_dump(mode="json"),
        "weights": model.weights_digest,
        "bootstrap_seed": SEED,
        "task": task.config.model_dump(mode="json"),
    }


def rehearse(task: Task, model: LanguageModel, held: Part | None = None) -> Rehearsal:
    """Make and check all that a task asks of `model`, and compute nothing. `held`: as of `Rehearsal`.

    Raises UserError naming what is wrong.
    """
    rehearsal = Rehearsal(model.scorer, {}, {}, model.tokenizer, held=held)
    try:
        run_task(task, rehearsal)
    except UserError as error:
        named = f"task {task.name}"
        raise error if str(error).startswith(named) else UserError(f"{named}: {error}") from None
    return rehearsal


class _Document(NamedTuple):
    request: Request  # the document, after what precedes it
    bytes: int


def _perplexity(task: Task, config: PerplexityTask, model: LanguageModel) -> tuple[int, dict[str, Figure]]:
    """Figures over all tokens of all documents; a document is an item of the bootstrap, unless it is empty."""
    length = model.scorer.context
    stride = config.stride or max(length // 2, 1)
    rows: list[tuple[float, int, int]] = []
    for group in _groups(_stored(task, config, model) if config.store is not None else _texts(task, config, model)):
        group = [document for document in group if document.request.continuation and document.bytes]
        scores = model.score([document.request for document in group], stride=stride)
        for score, document in zip(scores, group, strict=True):
            rows.append((-score.logprob, len(document.request.continuation), document.bytes))
    if not rows:
        raise UserError(f"task {task.name}: its texts are empty.")
    values_N3 = np.array(rows, np.float64)

    def figure(of: int, scale: float = 1.0, exponential: bool = False) -> Figure:
        def statistic(means: np.ndarray) -> np.ndarray:
            ratio = scale * means[..., 0] / means[..., of]
            return np.exp(ratio) if exponential else ratio

        return Figure(float(statistic(values_N3.mean(0))), standard_error(values_N3, statistic))

    per_byte = figure(2, 1 / math.log(2))
    return len(rows), {"perplexity": figure(1, exponential=True), "nats_per_token": figure(1), "bits_per_byte": per_byte}


def _groups(documents: Iterable[_Document]) -> Iterator[list[_Document]]:
    """Documents that are scored together: their tokens are held in memory."""
    group: list[_Document] = []
    tokens = 0
    for document in documents:
        group.append(document)
        tokens += sum(map(len, document.request))
        if tokens >= TOGETHER:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _texts(task: Task, config: PerplexityTask, model: LanguageModel) -> Iterator[_Document]:
    assert config.data is not None, "checked when the task was read"
    path = task.path_of(config.data)
    if task.has_items:
        for item in task.items:
            where = task.where(item)
            text = template.text_of(template.lookup(item.values, config.text_field, where), config.text_field, where)
            prompt = None if config.prompt is None else template.render(config.prompt, item.values, where)
            whole = Request((model.prefix,), model.encode(text)) if prompt is None else model.request(prompt, text)
            spaces = "" if prompt is None else prompt[len(prompt.rstrip()) :]  # are scored as the beginning of the text
            yield _Document(whole, len((spaces + text).encode()))
        return
    try:
        text = read_file(path, MOST_TEXT).decode()  # with its line ends
    except (OSError, UnicodeDecodeError) as error:
        raise error_kind(error)(f"task {task.name}: {path} cannot be read as UTF-8 text: {error}.") from None
    yield _Document(Request((model.prefix,), model.encode(text)), len(text.encode()))


def _stored(task: Task, config: PerplexityTask, model: LanguageModel) -> Iterator[_Document]:
    """Documents of a token store, each with its end-of-document token, which has no bytes."""
    assert config.store is not None
    store = TokenStore(config.store, config.split)
    if store.info.tokenizer_hash != model.tokenizer.hash:
        raise UserError(f"task {task.name}: the store {config.store} has another tokenizer than the model; name its text instead.")
    if store.info.content != "text":
        raise UserError(
            f"task {task.name}: the store {config.store} holds {store.info.content}, not texts: give their lines with a prompt."
        )
    number = min(store.size.documents, config.limit or store.size.documents)
    if number == 0:
        raise UserError(f"task {task.name}: the store {config.store} has no {config.split} documents.")
    offsets = store.read_documents(0, number + 1).astype(np.int64).tolist()
    for start, stop in pairwise(offsets):
        ids = store.read(start, stop)
        yield _Document(Request((model.prefix,), tuple(ids.tolist())), len(model.tokenizer.decode(ids[:-1]).encode()))


def _multiple_choice(task: Task, config: MultipleChoiceTask, model: LanguageModel) -> tuple[int, dict[str, Figure]]:
    """Accuracies: by the log-likelihood of each choice; by that divided by the choice's characters (acc_norm of lm-evaluation-harness); by
    its difference from the log-likelihood after `unconditional` (GPT-3, arXiv 2005.14165, section 2.4).
    """
    prompts = Prompts(task, config)
    choices = [prompts.choices(item) for item in task.items]
    gold = [prompts.gold(item) for item in task.items]
    asked, alone = [], []
    for number, item in enumerate(task.items):
        prompt = prompts.with_shots(number)
        for choice in choices[number]:
            text = prompts.continuation(item, choice)
            asked.append(model.request(prompt, text))
            if not asked[-1].continuation:
                raise UserError(f"{task.where(item)}: the choice {choice!r} adds no token to the prompt: begin it with a space.")
            if config.unconditional is not None:
                alone.append(model.request(template.render(config.unconditional, item.values, task.where(item)), text))
    scores = iter(model.score(asked))
    likelihoods = [np.array([next(scores).logprob for _ in of_item]) for of_item in choices]
    measured = {"accuracy": likelihoods}
    sizes = [np.array([max(len(choice), 1) for choice in of_item]) for of_item in choices]
    measured["accuracy_norm"] = [values / size for values, size in zip(likelihoods, sizes, strict=True)]
    if config.unconditional is not None:
        before = iter(model.score(alone))
        measured["accuracy_unconditional"] = [values - np.array([next(before).logprob for _ in values]) for values in likelihoods]
    return len(gold), {
        name: _mean(np.array([values.argmax() == right for values, right in zip(of_items, gold, strict=True)], np.float64))
        for name, of_items in measured.items()
    }


def _exact_match(task: Task, config: ExactMatchTask, model: LanguageModel) -> tuple[int, dict[str, Figure]]:
    """The share of items with the answer as greedy continuation."""
    prompts = Prompts(task, config)
    texts = model.generate([prompts.with_shots(number) for number in range(len(task.items))], config.max_new_tokens, config.stop)
    wanted = [template.render(config.answer, item.values, task.where(item)) for item in task.items]

    def plain(text: str) -> str:
        return text.strip().casefold() if config.ignore_case else text.strip()

    right = [plain(text) == plain(answer) for text, answer in zip(texts, wanted, strict=True)]
    return len(right), {"exact_match": _mean(np.array(right, np.float64))}


def _mean(values: np.ndarray) -> Figure:
    return Figure(float(values.mean()), standard_error(values, lambda means: means))
