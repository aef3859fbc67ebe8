"""Generation: ids that continue a batch of prompts, on the current mesh."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.config import UserError
from maxlm.config.schema import ModelConfig, PrecisionConfig
from maxlm.inference import decoding
from maxlm.inference.decoding import Rows
from maxlm.inference.sampling import Sampler, row_seeds, split
from maxlm.kernels.attention.xla import QUERY_BLOCK
from maxlm.models.parameters import Parameters
from maxlm.parallel import mesh_axes
from maxlm.training.fits import Slots

__all__ = ["Prepared", "Sampler", "batch_rows", "bucket", "cache_slots", "continue_ids", "generate", "prepare"]

Ids = list[int]

LEAST_PROMPT, LEAST_CACHE = 16, 64  # slots of the smallest buckets
CHECK_EVERY = 16  # tokens between looks for a stop


class Prepared(NamedTuple):
    """A model ready to generate: the copy of its weights that `decoding` reads, and their precision."""

    config: ModelConfig
    precision: PrecisionConfig
    weights: decoding.Weights


def prepare(config: ModelConfig, params: Parameters, model_state: Parameters, precision: PrecisionConfig) -> Prepared:
    """Copy the weights, in the dtype of `precision.compute`, as generation reads them. The current mesh is the mesh of `params`.

    Raises UserError for a model with experts that choose their tokens.
    """
    _check_model(config)
    return Prepared(config, precision, decoding.prepare(config, precision.compute, params, model_state))


def generate(
    config: ModelConfig,
    params: Parameters,
    model_state: Parameters,
    prompts: Sequence[Ids],
    sampler: Sampler,
    end_of_document: int,
    *,
    dtype: str = "float32",
    finished: Callable[[Ids], bool] | None = None,
) -> list[Ids]:
    """As `continue_ids`, of a model that is prepared for this call alone. `dtype`: of matrices, activations and caches.

    Raises UserError also for a model with experts that choose their tokens.
    """
    _check_model(config)
    _check(config, prompts, sampler, finished is not None)
    if not prompts:
        return []
    prepared = prepare(config, params, model_state, PrecisionConfig.model_validate({"compute": dtype}))
    return continue_ids(prepared, prompts, sampler, end_of_document, finished)


def continue_ids(
    prepared: Prepared, prompts: Sequence[Ids], sampler: Sampler, end_of_document: int, finished: Callable[[Ids], bool] | None = None
) -> list[Ids]:
    """Generate ids that continue each prompt, up to the end of the document (left out) or `max_new_tokens`.

    The current mesh is the mesh of `params`. A continuation depends on the seed, its prompt, and how many equal prompts precede it: on no
    other prompt and no mesh, but for rounding. `finished`: True for a continuation, or the beginning of one, that has come to a stop; it
    is cut after the first token for which that holds, and looked at every `CHECK_EVERY` tokens. Memory grows with the number of prompts
    and the longest of them.

    Programs are compiled for buckets of prompt lengths, of slots of the caches and of rows, and for what is used of the sampler.

    Raises UserError for an empty prompt, an id beyond the vocabulary, more positions than a learned table has, and stop texts without
    `finished`.
    """
    config, precision, weights = prepared
    _check(config, prompts, sampler, finished is not None)
    if not prompts:
        return []
    shape, numbers = split(sampler, config.vocab_size)
    batch, start = batch_rows(len(prompts)), prompt_slots(max(map(len, prompts)))
    tokens_BS, first_B, done_B = np.zeros((batch, start), np.int32), np.full(batch, start - 1, np.int32), np.ones(batch, bool)
    for i, prompt in enumerate(prompts):
        tokens_BS[i, start - len(prompt) :], first_B[i], done_B[i] = prompt, start - len(prompt), False
    seeds_B2 = np.zeros((batch, 2), np.uint32)
    seeds_B2[: len(prompts)] = row_seeds(sampler.seed, prompts)
    rows = Rows(jnp.asarray(first_B), jnp.asarray(seeds_B2), jnp.int32(start), jnp.int32(end_of_document), numbers)
    limit = start + sampler.max_new_tokens

    room = bucket(start + 1, LEAST_CACHE)
    state = decoding.prefill(shape, precision, room, weights, rows, tokens_BS, done_B)
    slot = start + 1
    while True:
        known_BN, done_B = np.array(state.tokens_BT)[:, start:slot], np.array(state.done_B)  # copies: the state is donated
        if finished is not None:
            done_B[: len(prompts)] |= [finished(_until(known, end_of_document)) for known in known_BN[: len(prompts)]]
            state = state._replace(done_B=done_B)
        if slot == limit or done_B.all():
            break
        if slot == room:
            room = bucket(room + 1, LEAST_CACHE)
            state = decoding.grow(state, room)
        slot = min(limit, room, slot + CHECK_EVERY if finished is not None else limit)
        state = decoding.decode(shape, precision, weights, rows, state, np.int32(slot))
        slot = int(state.slot)
    found = [_until(known, end_of_document) for known in known_BN[: len(prompts)]]
    return found if finished is None else [_cut(ids, finished) for ids in found]


def prompt_slots(length: int) -> int:
    """Slots of prompts of at most `length` tokens: of a bucket, and as many as divide over the devices that split a sequence, and into
    blocks of attention's queries.
    """
    mesh = jax.sharding.get_abstract_mesh()
    devices = math.prod(mesh.shape[axis] for axis in mesh_axes("seq_vocab", mesh))
    slots = bucket(length, LEAST_PROMPT)
    unit = math.lcm(devices, QUERY_BLOCK) if slots > QUERY_BLOCK else devices
    return -(-slots // unit) * unit


def cache_slots(length: int, new: int) -> Slots:
    """Slots that generation takes, for prompts of at most `length` tokens and `new` more."""
    prompt = prompt_slots(length)
    before, last = 0, bucket(prompt + 1, LEAST_CACHE)
    while last < prompt + new:
        before, last = last, bucket(last + 1, LEAST_CACHE)
    return Slots(prompt, before, last)


def batch_rows(prompts: int) -> int:
    """Rows of the batch: of a bucket, and as many as divide over the devices that split it."""
    mesh = jax.sharding.get_abstract_mesh()
    devices = math.prod(mesh.shape[axis] for axis in mesh_axes("batch", mesh))
    return -(-bucket(prompts, 1) // devices) * devices


def bucket(n: int, least: int) -> int:
    """The smallest of 1, 1.5, 2, 3, 4, 6, 8 ... times `least`, an integer, that is at least n."""
    size = least
    while size < n:
        size += max(1, size // 2 if size & (size - 1) == 0 else size // 3)
    return size


def _check_model(config: ModelConfig) -> None:
    """Raise UserError for a model that cannot be read token by token."""
    if config.looks_ahead:
        raise UserError(
            f"{config.looks_ahead}: experts choose among all tokens of a sequence, later ones too, so that no token can be "
            "generated before them: generate with a model trained with model.moe.router.choice = token."
        )


def _check(config: ModelConfig, prompts: Sequence[Ids], sampler: Sampler, finishes: bool) -> None:
    length = max(map(len, prompts), default=0) + sampler.max_new_tokens
    if not all(map(len, prompts)):
        raise UserError("the prompt is empty: give at least one token to continue.")
    if (largest := max(map(max, prompts), default=0)) >= config.vocab_size:
        raise UserError(f"the prompt holds token id {largest}, and the model's vocabulary has {config.vocab_size}: use its own tokenizer.")
    if config.max_seq_len is not None and length > config.max_seq_len:
        raise UserError(
            f"prompt and continuation have {length} tokens, above model.learned_positions.max_seq_len = {config.max_seq_len}: ask for less."
        )
    for prompt in prompts:
        most = config.most_generated(len(prompt))
        if most is not None and len(prompt) + sampler.max_new_tokens > most:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and {sampler.max_new_tokens} new ones are above {most}, where the scaling of model.rope "
                "changes the frequencies of all tokens, and keys are computed once: ask for less, or give a longer prompt."
            )
    if sampler.stop and not finishes:
        raise UserError("stop texts are looked for in text, and ids alone have none: continue texts with maxlm.inference.text.")


def _until(known: np.ndarray, end: int) -> Ids:
    ids: Ids = known.tolist()
    return ids[: ids.index(end)] if end in ids else ids


def _cut(ids: Ids, finished: Callable[[Ids], bool]) -> Ids:
    """The shortest beginning of `ids` that has come to a stop; all of them if none has."""
    if not finished(ids):
        return ids
    low, high = 0, len(ids)  # the first is too short, the second is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if finished(ids[:middle]) else (middle, high)
    return ids[:high]
