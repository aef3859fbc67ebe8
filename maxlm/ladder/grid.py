"""The runs of a ladder: every size with every length and seed, each a plain config made from the base."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from maxlm.base.errors import ConfigError, UserError
from maxlm.config.loader import load
from maxlm.config.schema import Config, ModelConfig, OptimizerConfig, TrainConfig
from maxlm.data import manifest
from maxlm.ladder.settings import LadderSettings, SizeConfig
from maxlm.models.counts import count_active_parameters, token_flops

WIDER = (2, 4, 8, 16, 32)  # times the largest size, for the cost of a token of a larger model
LONG = 1_000_000  # steps, where only the model matters
ROUND = 8  # that widths of feed-forward layers are multiples of; 128 from 512 on
# Settings without which the losses of a ladder say nothing of another config.
ASSUMED = ("model.vocab_size", "model.parametrization", "data.store", "data.mixture", "data.seq_len", "optimizer.name")
RESERVED = ("run.", "train.steps", "train.tokens", "train.seed", "train.eval_every")  # which the ladder sets itself


@dataclass(frozen=True)
class Rung:
    """One run. `parameters`: active for a token, embeddings included or not as `fit.parameters` says; `flops`: model FLOPs of the run."""

    name: str
    size: str
    length: str  # as the file says it, such as budget 1e+15
    seed: int
    config: Config
    parameters: int
    tokens: int
    flops: float


def epochs(stores: tuple[str, ...], tokens: int) -> float | None:
    """Times that a run of so many tokens reads its stores, at least; None where they cannot be read here."""
    unique = _unique_tokens(stores)
    return tokens / unique if unique else None


@lru_cache
def _unique_tokens(stores: tuple[str, ...]) -> int | None:
    try:
        found = [manifest.load(store) for store in stores]
    except (UserError, OSError):
        return None
    return sum(one.splits["train"].tokens if one is not None and "train" in one.splits else 0 for one in found)


def make_grid(settings: LadderSettings) -> list[Rung]:
    """All runs, smallest first. Raises UserError: the base is no config, a size cannot be trained, or no run is left."""
    base = base_of(settings)
    _check_base(settings, base.model, base.train, base.optimizer)
    rungs: list[Rung] = []
    for name in settings.sizes:
        for length, tokens in _lengths(settings, name, base.model):
            rungs += [
                _rung(settings, name, base.model, (length, max(1, round(tokens / base.tokens_per_step))), seed) for seed in settings.seeds
            ]
    if not rungs:
        raise UserError("no run of the ladder has between least_ratio and most_ratio tokens per parameter: change budgets or these limits.")
    seen: dict[tuple[str, int, int], Rung] = {}
    for rung in rungs:
        if (other := seen.setdefault((rung.size, rung.tokens, rung.seed), rung)) is not rung:
            raise UserError(f"size {rung.size}: {other.length} and {rung.length} are the same {rung.tokens:,} tokens: leave one out.")
    return sorted(rungs, key=lambda rung: (rung.flops, rung.name))


def model_settings(base: ModelConfig, size: SizeConfig) -> dict[str, int]:
    """Sizes of the model by dotted key, those that are not given in the proportions of `base`."""
    group = base.n_heads // base.n_kv_heads  # as many query heads share a key in every size that has as many
    n_heads = size.n_heads or group * round(size.d_model / base.head_dim / group) or max(1, round(size.d_model / base.head_dim))
    shared = max(1, round(n_heads / group))
    n_kv_heads = size.n_kv_heads or max(number for number in range(1, shared + 1) if n_heads % number == 0)
    found = {"model.d_model": size.d_model, "model.n_layers": size.n_layers, "model.n_heads": n_heads, "model.n_kv_heads": n_kv_heads}
    if base.latent is None:
        found["model.head_dim"] = base.head_dim if size.n_heads is None else max(1, size.d_model // n_heads)
    else:
        del found["model.n_kv_heads"]
    found["model.d_ff"] = size.d_ff or _round(size.d_model * base.d_ff / base.d_model, size.d_model)
    if base.moe is not None:
        found["model.moe.d_ff"] = _round(size.d_model * base.moe.d_ff / base.d_model, size.d_model)
    return found


def resized(model: ModelConfig, settings: Mapping[str, int]) -> ModelConfig:
    """Return a dense model with the sizes of `model_settings`."""
    return model.model_copy(update={key.removeprefix("model."): value for key, value in settings.items()})


def parameters_of(config: ModelConfig, kind: str) -> int:
    """Active parameters; `without_embeddings`: without tables of tokens; the FLOPs count their matmul."""
    tables = 1 if config.tie_embeddings else 2
    return count_active_parameters(config) - (tables * config.vocab_size * config.d_model if kind == "without_embeddings" else 0)


def token_costs(rungs: Sequence[Rung], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Sizes, smallest first, and model FLOPs of a token per parameter: of the rungs, and of wider models in the proportions of the largest.
    It is 6 of large ones; of small ones attention and the tables of tokens, counted or not, make it more or less.
    """
    found = {rung.parameters: rung.flops / rung.tokens / rung.parameters for rung in rungs}
    largest = max(rungs, key=lambda rung: rung.parameters).config
    for times in WIDER if largest.model.moe is None else ():
        size = SizeConfig(d_model=largest.model.d_model * times, n_layers=largest.model.n_layers * times)
        model = resized(largest.model, model_settings(largest.model, size))
        parameters = parameters_of(model, kind)
        found[parameters] = token_flops(model, largest.data.seq_len) / parameters
    sizes = sorted(found)
    return np.array(sizes, np.float64), np.array([found[size] for size in sizes])


def assumed(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of the settings that `ASSUMED` names, from a config as JSON without the settings that are None."""
    return {key: sections[key.partition(".")[0]].get(key.partition(".")[2]) for key in ASSUMED}


def _round(width: float, d_model: int) -> int:
    unit = ROUND if d_model < 512 else 128
    return max(unit, round(width / unit) * unit)


def _check_base(settings: LadderSettings, model: ModelConfig, train: TrainConfig, optimizer: OptimizerConfig) -> None:
    """Raise UserError for what the runs of a ladder cannot share."""
    if train.eval_batches == 0:
        raise UserError(f"{settings.base}: train.eval_batches = 0: a ladder fits the loss on held-out text; set at least 1.")
    if train.batch_ramp:
        raise UserError(f"{settings.base}: train.batch_ramp goes by tokens, and the runs of a ladder have different lengths: leave it out.")
    if optimizer.decays_at_end and (optimizer.decay_steps or optimizer.decay_tokens):
        raise UserError(
            f"{settings.base}: a decay of fixed length has another share of each run of a ladder: leave it out for a tenth of each."
        )
    reserved = RESERVED if settings.warmup is None else (*RESERVED, "optimizer.warmup")
    derived = {key for size in settings.sizes.values() for key in model_settings(model, size)}
    for field, key in settings.given():
        if key.startswith(reserved) or key in derived:
            raise ConfigError(field, key, "is set by the ladder itself", "leave it out")


def base_of(settings: LadderSettings) -> Config:
    """The config that every run is made from, with the settings of all. Raises UserError."""
    return load(settings.base, [f"{key}={_yaml(value)}" for key, value in settings.settings.items()]).config


def variant(rung: Rung, settings: LadderSettings, name: str, values: Mapping[str, Any]) -> Rung:
    """A run of the same size called `name`, with other settings. Raises UserError if they do not make a config."""
    config = _load(
        settings, base_of(settings).model, rung.size, name, {"train.steps": rung.config.total_steps, "train.seed": rung.seed, **values}
    )
    tokens = config.total_steps * config.tokens_per_step
    return replace(rung, name=name, seed=config.train.seed, config=config, tokens=tokens, flops=rung.flops / rung.tokens * tokens)


def _lengths(settings: LadderSettings, name: str, base: ModelConfig) -> Iterator[tuple[str, float]]:
    """(the length as the file says it, tokens) of one size."""
    config = _load(settings, base, name, name, {"train.steps": LONG})
    parameters, flops = parameters_of(config.model, settings.fit.parameters), token_flops(config.model, config.data.seq_len)
    yield from ((f"tokens {_short(tokens)}", float(tokens)) for tokens in settings.tokens)
    yield from ((f"ratio {ratio:g}", ratio * parameters) for ratio in settings.tokens_per_parameter)
    for budget in settings.budgets:
        if settings.least_ratio <= budget / flops / parameters <= settings.most_ratio:
            yield f"budget {budget:.6g}", budget / flops


def _rung(settings: LadderSettings, name: str, base: ModelConfig, length: tuple[str, int], seed: int) -> Rung:
    """`length`: as the file says it, and in steps."""
    said, steps = length
    values: dict[str, Any] = {"train.steps": steps, "train.seed": seed}
    if settings.warmup is not None:
        values |= {"optimizer.warmup_tokens": None, "optimizer.warmup_steps": round(settings.warmup * steps)}
    run = f"{name}-{said.replace(' ', '').replace('+', '')}" + (f"-seed{seed}" if seed else "")  # the same when seeds are added
    config = _load(settings, base, name, run, values)
    total = steps * config.tokens_per_step
    flops = token_flops(config.model, config.data.seq_len) * total
    return Rung(run, name, said, seed, config, parameters_of(config.model, settings.fit.parameters), total, flops)


def _load(settings: LadderSettings, base: ModelConfig, size: str, run: str, values: Mapping[str, Any]) -> Config:
    """The config of a run of this size, with `values` by dotted key. Raises UserError that names the size."""
    everything = {
        **model_settings(base, settings.sizes[size]),
        "train.tokens": None,
        "train.eval_every": None,
        **settings.settings,
        **settings.sizes[size].settings,
        **values,
        "run.dir": f"{settings.folder}/runs",
        "run.name": run,
    }
    try:
        return load(settings.base, [f"{key}={_yaml(value)}" for key, value in everything.items()], shorten=False).config
    except UserError as error:
        raise UserError(f"size {size} of the ladder: {error}") from None


def _short(tokens: int) -> str:
    """2000000 -> 2M; other numbers stay whole."""
    for scale, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if tokens >= scale and tokens % (scale // 1000) == 0:
            return f"{tokens / scale:g}{letter}"
    return str(tokens)


def _yaml(value: Any) -> str:
    """JSON, which YAML reads."""
    return json.dumps(dict(value) if isinstance(value, Mapping) else value)
