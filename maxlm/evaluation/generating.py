"""Generation for tasks: the one place that calls `maxlm.inference`."""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from maxlm.config.schema import Config
from maxlm.inference.generate import Sampler, generate
from maxlm.models import Parameters


def continuations(
    config: Config,
    mesh: Mesh,
    params: Parameters,
    model_state: Parameters,
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    end_of_document: int,
    finished: Callable[[list[int]], bool],
) -> list[list[int]]:
    """The most likely continuation of each prompt, token by token: at most `tokens` ids, up to the end of the document; it may end as soon
    as it is `finished`.
    """
    sampler = Sampler(max_new_tokens=tokens, temperature=0.0)
    ids = [list(prompt) for prompt in prompts]
    weights, dtype = (config.model, params, model_state), config.precision.compute
    with jax.set_mesh(mesh):
        return generate(*weights, ids, sampler, end_of_document, dtype=dtype, finished=finished)
