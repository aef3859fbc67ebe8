"""Text in, text out, with the model of a run."""

from collections.abc import Callable
from pathlib import Path

import jax
from rich.console import Console

from maxlm.config import Config, UserError
from maxlm.config.rules import most_generated
from maxlm.config.schema import MeshConfig, WeightsKind
from maxlm.data.tokenizer import Tokenizer, open_tokenizer
from maxlm.inference.generate import Sampler, generate
from maxlm.models.parameters import Parameters
from maxlm.parallel import build_mesh
from maxlm.training.fits import check_generation
from maxlm.training.saved_run import open_run


def generate_from_run(directory: Path, prompt: str, sampler: Sampler, step: int | None = None, of: WeightsKind = "raw") -> str:
    """Continue `prompt` with the model of a run directory: of the newest checkpoint, or exactly `step`; its weights, or their average.

    Raises UserError if the directory is no run or holds no checkpoint.
    """
    run = open_run(directory)
    config = run.config
    tokenizer = run_tokenizer(directory)
    length, most = len(tokenizer.encode(prompt)) + sampler.max_new_tokens, most_generated(config)
    if length > most:
        raise UserError(
            f"prompt and continuation have {length:,} tokens, and this model takes {most:,}: shorten the prompt, or lower --tokens."
        )
    check_generation(config.model, length)
    weights = run.weights(build_mesh(config.model_copy(update={"mesh": MeshConfig()}), jax.devices()[:1]), step, of)
    return continue_text(config, weights.params, weights.model_state, tokenizer, prompt, sampler)


def continue_text(config: Config, params: Parameters, model_state: Parameters, tokenizer: Tokenizer, prompt: str, sampler: Sampler) -> str:
    """The continuation alone, without `prompt`."""
    ids = tokenizer.encode(prompt).tolist()
    return tokenizer.decode(generate(config.model, params, model_state, ids, sampler, tokenizer.end_of_document_id))


def run_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a run, from the copy in its directory."""
    return open_tokenizer(str(directory / "tokenizer"))


def print_samples(
    config: Config, directory: Path, params: Parameters, model_state: Parameters, console: Console, *, stopped: Callable[[], bool]
) -> None:
    """Continue each of `samples.prompts` and print it; none more once `stopped()`."""
    if config.samples is None:
        return
    tokenizer = run_tokenizer(directory)
    for prompt in config.samples.prompts:
        if stopped():
            return
        room = most_generated(config) - len(tokenizer.encode(prompt))
        console.rule(f"continuation of {prompt!r}", align="left", style="dim")
        if room < 1:
            console.print(f"nothing: the prompt fills all {most_generated(config):,} tokens of the context", markup=False, highlight=False)
            continue
        sampler = Sampler(max_new_tokens=min(config.samples.tokens, room))
        text = continue_text(config, params, model_state, tokenizer, prompt, sampler)
        console.print(prompt + text, markup=False, highlight=False, soft_wrap=True)
