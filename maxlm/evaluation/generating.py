"""Generation for tasks: the one place that calls `maxlm.inference`."""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from maxlm.config.schema import Config
from maxlm.inference.generate import Sampler, batch_rows, cache_slots, continue_ids, prepare
from maxlm.models import Parameters
from maxlm.training.fits import Part, check_generation


class Greedy:
    """Generates with a copy of the weights, which lives as long as this does."""

    def __init__(self, config: Config, mesh: Mesh, params: Parameters, model_state: Parameters) -> None:
        self._mesh = mesh
        with jax.set_mesh(mesh):
            self._prepared = prepare(config.model, params, model_state, config.precision)

    def continuations(
        self, prompts: Sequence[tuple[int, ...]], tokens: int, end_of_document: int, finished: Callable[[list[int]], bool]
    ) -> list[list[int]]:
        """The most likely continuation of each prompt, token by token: at most `tokens` ids, up to the end of the document; it may end as
        soon as it is `finished`.
        """
        with jax.set_mesh(self._mesh):
            sampler = Sampler(max_new_tokens=tokens, temperature=0.0)
            return continue_ids(self._prepared, list(map(list, prompts)), sampler, end_of_document, finished)


def check_memory(config: Config, mesh: Mesh, held: Part, prompts: int, longest: int, tokens: int) -> None:
    """Raise UserError if a device cannot generate `tokens` for so many prompts together, of `longest` tokens, beside what is `held`."""
    with jax.set_mesh(mesh):
        slots, rows = cache_slots(longest, tokens), batch_rows(prompts)
    check_generation(config.model, slots, rows, dict(mesh.shape), config.precision.compute, held)
