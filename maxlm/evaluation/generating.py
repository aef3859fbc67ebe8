"""Batched generation for tasks: the one place that calls `maxlm.inference`."""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from maxlm.config.schema import Config
from maxlm.inference.generate import Sampler, generate
from maxlm.models import Parameters


def continuations(
    config: Config, mesh: Mesh, params: Parameters, model_state: Parameters, prompts: Sequence[list[int]], tokens: int, end_of_document: int
) -> list[list[int]]:
    """The most likely continuation of each prompt, token by token: at most `tokens` ids, up to the end of the document."""
    sampler = Sampler(max_new_tokens=tokens, temperature=0.0)
    with jax.set_mesh(mesh):
        return [generate(config.model, params, model_state, list(prompt), sampler, end_of_document) for prompt in prompts]
