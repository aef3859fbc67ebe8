"""Text in, text out, with the model of a run; messages are rendered by the chat template that a chat model was trained with."""

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from maxlm.base.console import Console, print_line
from maxlm.base.paths import read_file
from maxlm.config import UserError
from maxlm.config.derived import command_line, without_training
from maxlm.config.schema import ModelConfig
from maxlm.config.sections.samples import most_generated
from maxlm.data import manifest
from maxlm.data.chat_template import Conversation
from maxlm.data.conversations import turn_end
from maxlm.data.messages import FIELD, SHAREGPT, TextChecker, read_conversation
from maxlm.data.rendering import RenderingProcess
from maxlm.data.stops import Stops
from maxlm.data.template_files import find_template
from maxlm.data.tokenizer import Tokenizer, companions_of
from maxlm.inference.generate import Ids, Sampler, batch_rows, cache_slots, generate
from maxlm.models.parameters import Parameters
from maxlm.parallel import build_mesh
from maxlm.training.fits import check_generation
from maxlm.training.saved_run import TOKENIZER, SavedRun, open_run

Prompt = str | dict[str, Any]  # a user's message, or a row with `messages`, and perhaps `tools` and `chat_template_kwargs`


class ChatPrompts(NamedTuple):
    """Ids of rendered prompts, and special tokens that end the assistant's turns."""

    ids: list[list[int]]
    ends: tuple[str, ...]


def chat_prompts(folder: Path, tokenizer: Tokenizer, prompts: Sequence[Prompt], *, special: bool) -> ChatPrompts:
    """Render `prompts` with the chat template in `folder`, the tokenizer folder of a model, up to where the assistant's answer begins.

    Date and arguments of the template are those that the model's data was prepared with; without a date, today's. `special`: special
    tokens in messages are those tokens. Raises UserError: there is no template, it fails on a prompt, or a prompt holds a special token.
    """
    info = manifest.load(str(folder))
    settings = {} if info is None else info.settings
    date = settings.get(f"{FIELD}.date") or datetime.now().astimezone().date().isoformat()
    template = find_template(companions_of(str(folder)), date=date, arguments=settings.get(f"{FIELD}.chat_template_kwargs") or {})
    if template is None:
        raise UserError(
            f"--chat: {folder.parent} has no chat template (no {manifest.TEMPLATE}, and none in {manifest.SETTINGS} of its tokenizer): "
            "prompt it with plain texts."
        )
    check = TextChecker(tokenizer.special_pattern, special, "take it out, or give --special-tokens if it is meant as that token")
    render = RenderingProcess(template)
    try:
        texts = [_rendered(render, prompt, f"prompt {number}", check) for number, prompt in enumerate(prompts, 1)]
        ends = _turn_ends(render, tokenizer)
    finally:
        render.close()
    return ChatPrompts([tokenizer.encode(text, special=True).tolist() for text in texts], ends)


def _rendered(render: RenderingProcess, prompt: Prompt, where: str, check: TextChecker) -> str:
    record = {"messages": [{"role": "user", "content": prompt}]} if isinstance(prompt, str) else prompt
    try:
        conversation = read_conversation(record, "messages", check, prompt=True)
        if conversation.messages[-1]["role"] == "assistant":
            raise UserError("the messages end with a turn of the assistant, after which another would begin: end them with the user's.")
        return render.prompt(conversation)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _turn_ends(render: RenderingProcess, tokenizer: Tokenizer) -> tuple[str, ...]:
    """The special token that the template writes at the end of an answer, if it writes one."""
    messages = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    try:
        rendered = render(Conversation(messages))
    except UserError:  # a template for other conversations
        return ()
    end = turn_end(rendered, *tokenizer.encode_rendered(rendered.text)) if rendered.spans else -1
    return tuple(token for token in sorted(tokenizer.special) if np.array_equal(tokenizer.encode(token, special=True), [end]))


_log = logging.getLogger(__name__)
DTYPES = ("float32", "bfloat16")
MOST_PROMPTS = 2**16  # of a file
MOST_BYTES = 2**28  # of a file of prompts


def generate_from_run(
    directory: Path,
    prompts: Sequence[Prompt],
    sampler: Sampler,
    step: int | None = None,
    *,
    of: str = "raw",
    overrides: Sequence[str] = (),
    dtype: str = "float32",
    chat: bool = False,
    special: bool = False,
) -> list[str]:
    """Continue `prompts` with the model of a run directory, of the newest checkpoint or exactly `step`: its weights, or their average.

    `overrides`: settings of the mesh that the weights are split over; without any they lie on one device. `chat`: prompts are conversations
    that the model's chat template renders, and what follows is the assistant's turn. `special`: special tokens in prompts are those tokens.

    Raises UserError if the directory is no run or holds no checkpoint, or for a mesh, dtype or lengths that do not fit.
    """
    run = open_run(directory)
    config = run.config
    tokenizer = run.text_tokenizer()
    refusal = " is no setting of the mesh: only those change how a model is generated with, such as mesh.fsdp=8."
    chosen, devices = command_line(overrides, ["mesh"], refusal), jax.devices() if overrides else jax.devices()[:1]
    mesh = build_mesh(without_training(config.model, config.data.seq_len, len(devices), chosen), devices)
    asked = Asked(prompts, sampler, dtype, chat, special)

    def weights() -> tuple[Parameters, Parameters]:
        read = run.weights(mesh, step, of)
        return read.params, read.model_state

    return continue_asked(config.model, config.data.seq_len, mesh, weights, tokenizer, asked, run.directory / TOKENIZER)


class Asked(NamedTuple):
    """Prompts to continue. `chat`, `special`: as of `generate_from_run`."""

    prompts: Sequence[Prompt]
    sampler: Sampler
    dtype: str = "float32"
    chat: bool = False
    special: bool = False


def continue_asked(
    model: ModelConfig,
    seq_len: int,
    mesh: Mesh,
    weights: Callable[[], tuple[Parameters, Parameters]],
    tokenizer: Tokenizer,
    asked: Asked,
    folder: Path | None,
) -> list[str]:
    """Continue prompts with a model on `mesh`. `weights`: (parameters, model state), which are read once the request is known to fit;
    `folder`: of the tokenizer, with its chat template; None: there is none. Raises UserError.
    """
    if asked.dtype not in DTYPES:
        raise UserError(f"--dtype {asked.dtype} is not one of {' and '.join(DTYPES)}.")
    if not all(asked.prompts):
        raise UserError("the prompt is empty: give a text to continue.")
    ids, sampler = _encoded(folder, tokenizer, asked.prompts, asked.sampler, chat=asked.chat, special=asked.special)
    longest = max(map(len, ids))
    length, most = longest + sampler.max_new_tokens, most_generated(model, seq_len)
    if length > most:
        raise UserError(
            f"prompt and continuation have {length:,} tokens, and this model takes {most:,}: shorten the prompt, or lower --tokens."
        )
    with jax.set_mesh(mesh):
        slots, rows = cache_slots(longest, sampler.max_new_tokens), batch_rows(len(asked.prompts))
        check_generation(model, slots, rows, dict(mesh.shape), asked.dtype)
        return _continue(model, *weights(), tokenizer, ids, sampler, asked.dtype)


def _encoded(
    folder: Path | None, tokenizer: Tokenizer, prompts: Sequence[Prompt], sampler: Sampler, *, chat: bool, special: bool = False
) -> tuple[list[Ids], Sampler]:
    """Ids of prompts, and the sampler with the stops that belong to them."""
    if not chat:
        return [_plain(tokenizer, prompt, special) for prompt in prompts], sampler
    if folder is None:
        raise UserError("the chat template of a Hugging Face folder is read once the model is imported: use `maxlm import` first.")
    ids, ends = chat_prompts(folder, tokenizer, prompts, special=special)
    return ids, replace(sampler, stop=(*sampler.stop, *ends))


def _plain(tokenizer: Tokenizer, prompt: Prompt, special: bool) -> Ids:
    """Ids of a text to continue. Special tokens in it that are read as text are named in the log."""
    if not isinstance(prompt, str):
        raise UserError("a conversation is no text to continue: give --chat.")
    if not special and (found := tokenizer.special_pattern.search(prompt)):
        fix = "--special-tokens reads it as that token, and --chat renders the model's own chat template"
        _log.warning("the prompt holds %s, which is read as text: %s", found[0], fix)
    return tokenizer.encode_prompt(prompt, special=special)


def continue_texts(
    model: ModelConfig,
    params: Parameters,
    model_state: Parameters,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampler: Sampler,
    *,
    dtype: str = "float32",
) -> list[str]:
    """The continuations alone, without `prompts`, in one batch; as `generate`.

    Each ends with an id that the model ends texts with, or before the first of `sampler.stop` that its text holds, be it that the stop
    begins or ends inside a token: stops are looked for in the decoded continuation, every few tokens, and never in the prompt.
    """
    return _continue(model, params, model_state, tokenizer, [tokenizer.encode_prompt(prompt) for prompt in prompts], sampler, dtype)


def _continue(
    model: ModelConfig, params: Parameters, model_state: Parameters, tokenizer: Tokenizer, ids: list[Ids], sampler: Sampler, dtype: str
) -> list[str]:
    """The continuations of encoded prompts, as `continue_texts`."""
    stops = Stops(tokenizer, sampler.stop)
    end, check = tokenizer.end_of_document_id, stops.finished if stops else None
    found = generate(model, params, model_state, ids, sampler, end, dtype=dtype, finished=check)
    return [stops.text(new, prompt) for new, prompt in zip(found, ids, strict=True)]


def read_arguments(arguments: Sequence[str], file: Path | None) -> tuple[list[Prompt], list[str]]:
    """(prompts among the arguments of the command and in `file`, settings of the mesh among them). Raises UserError: there is no prompt."""
    mesh = [text for text in arguments if re.fullmatch(r"mesh\.\w+=\S*", text)]
    prompts: list[Prompt] = [text for text in arguments if text not in mesh]
    prompts += read_prompts(file) if file else []
    if not prompts:
        raise UserError("there is no prompt: give a text to continue, or --prompts FILE.")
    return prompts, mesh


def read_prompts(file: Path) -> list[Prompt]:
    """Prompts of a file: a text a line, or for a name that ends in .jsonl one JSON string, or object with a `prompt` or `messages`, a line.

    Raises UserError: it is not UTF-8, holds no prompt or too many, or a line is none of these.
    """
    kind = file.suffix.lower()
    if kind == ".json":
        raise UserError(f"--prompts {file} would be read as lines of text: write JSON lines, and name the file .jsonl.")
    try:
        text = read_file(file, MOST_BYTES).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise UserError(f"--prompts {file} is not UTF-8 text: save it as such.") from None
    lines = text.split("\n")  # not splitlines(), which also cuts at characters that JSON texts may hold
    prompts = [_prompt(line, f"--prompts {file}, line {n}", kind == ".jsonl") for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise UserError(f"--prompts {file} holds no prompt: write one a line.")
    if len(prompts) > MOST_PROMPTS:
        raise UserError(f"--prompts {file} holds {len(prompts):,} prompts, above {MOST_PROMPTS:,}, which are one batch: split the file.")
    return prompts


def _prompt(line: str, where: str, is_json: bool) -> Prompt:
    if not is_json:
        return line
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"{where} is no JSON: write a JSON string, or an object with a prompt, a line.") from None
    if isinstance(value, dict) and any(value.get(name) is not None for name in ("messages", SHAREGPT)):
        return value
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise UserError(f'{where} has no prompt: write a JSON string, or an object such as {{"prompt": "Once"}}, a line.')
    if any("\ud800" <= char <= "\udfff" for char in prompt):
        raise UserError(f"{where} holds half a surrogate pair, which is no text.")
    further = isinstance(value, dict) and any(value.get(name) for name in ("system", "tools", "chat_template_kwargs"))
    return {**value, "messages": [{"role": "user", "content": prompt}]} if further else prompt


def print_samples(
    saved: SavedRun, params: Parameters, model_state: Parameters, console: Console, *, stopped: Callable[[], bool]
) -> dict[str, str | None]:
    """Continue `samples.prompts`, in one batch on the mesh of `params`, print and return them: of a prompt that fills the context None; {}
    once `stopped()`.
    """
    config, samples = saved.trained, saved.trained.samples
    if samples is None or stopped():
        return {}
    tokenizer = saved.text_tokenizer()
    try:
        encoded, sampler = _encoded(saved.directory / TOKENIZER, tokenizer, samples.prompts, Sampler(), chat=samples.chat)
    except UserError as error:  # the run is done and saved
        print_line(console, f"no samples: {error}")
        return {}
    most, ids = most_generated(config.model, config.data.seq_len), dict(zip(samples.prompts, encoded, strict=True))
    lengths = {text: len(ids[text]) for text in ids}
    limits = {text: min(samples.tokens, min(most, config.model.most_generated(n) or most) - n) for text, n in lengths.items()}
    texts: dict[str, str] = {}
    with jax.set_mesh(jax.tree.leaves(params)[0].sharding.mesh):
        for limit in sorted({limit for limit in limits.values() if limit > 0}):  # one, unless a prompt nearly fills the context
            batch = [prompt for prompt in limits if limits[prompt] == limit]
            cut = replace(sampler, max_new_tokens=limit)
            found = _continue(config.model, params, model_state, tokenizer, [ids[prompt] for prompt in batch], cut, "float32")
            texts |= dict(zip(batch, found, strict=True))
    for prompt in samples.prompts:
        console.rule(f"{'answer to' if samples.chat else 'continuation of'} {prompt!r}", align="left", style="dim")
        if prompt in texts:
            print_line(console, texts[prompt] if samples.chat else prompt + texts[prompt])
        else:
            console.print(f"nothing: the prompt fills all {most:,} tokens of the context", markup=False, highlight=False)
    return {prompt: texts.get(prompt) for prompt in samples.prompts}
