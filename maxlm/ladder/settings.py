"""A ladder file: which sizes are trained, for how long, from which config, and how the losses are fitted."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from maxlm.base.errors import ConfigError
from maxlm.config.fields import Fraction, LocalPath, NonNegative, Positive, PositiveFloat, Section, Seed, Text, Tokens, flatten

MOST_RUNS = 1000
TUNED = ("optimizer.name", "optimizer.peak_lr", "optimizer.warmup", "optimizer.weight_decay", "train.", "run.")  # by a comparison
Budget = Annotated[float, Field(gt=0, allow_inf_nan=False)]  # FLOPs: more than float32 holds
Name = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class SizeConfig(Section):
    """One size. Settings that are not given keep the proportions of the base config: head_dim, n_heads / n_kv_heads, d_ff / d_model."""

    d_model: Positive
    n_layers: Positive
    n_heads: Positive | None = None
    n_kv_heads: Positive | None = None
    d_ff: Positive | None = None
    settings: dict[Text, Any] = Field(default_factory=dict)  # others, of this size alone, by dotted key, such as optimizer.peak_lr


class FitConfig(Section):
    """Settings of the fit."""

    form: Literal["chinchilla", "kaplan", "compute"] | None = None  # None: chinchilla if sizes have several lengths, else compute
    parameters: Literal["all", "without_embeddings"] = "all"  # that count as the size
    huber: PositiveFloat = 1e-2  # logarithm of loss from which on an error counts linearly
    samples: Annotated[int, Field(strict=True, ge=20, le=10_000)] = 200  # of the bootstrap


class ContestantConfig(Section):
    """Values that are tried for one optimizer, each with each: as many trials for all."""

    peak_lr: Annotated[tuple[PositiveFloat, ...], Field(min_length=1, max_length=64)]
    settings: dict[Text, Any] = Field(default_factory=dict)  # by dotted key, such as optimizer.muon.momentum


class CompareConfig(Section):
    """A comparison of optimizers, each tuned with equal trials at every size, at the shortest of the ladder's lengths."""

    optimizers: Annotated[dict[Name, ContestantConfig], Field(min_length=2, max_length=16)]  # by `optimizer.name`
    warmup: Annotated[tuple[Fraction, ...], Field(min_length=1, max_length=16)] | None = (
        None  # shares of the run, for all; None: the ladder's `warmup`, else the base's
    )
    weight_decay: Annotated[tuple[NonNegative, ...], Field(min_length=1, max_length=16)] | None = None  # the same
    seeds: Annotated[tuple[Seed, ...], Field(min_length=2, max_length=64)] = (1, 2, 3)  # of the final runs; trials have the seed 0

    @model_validator(mode="after")
    def _equal_trials(self) -> "CompareConfig":
        trials = {name: len(set(one.peak_lr)) for name, one in self.optimizers.items()}
        if len(set(trials.values())) > 1:
            said = ", ".join(f"{name} {count}" for name, count in trials.items())
            raise ConfigError(
                "compare.optimizers", said, "are different numbers of learning rates, which is no fair comparison", "give as many to each"
            )
        for name, one in self.optimizers.items():
            for key, _ in flatten(one.settings):
                if key.startswith(TUNED):
                    raise ConfigError(f"compare.optimizers.{name}.settings", key, "is set by the comparison itself", "leave it out")
        return self


class LadderSettings(Section):
    """The file. Lengths are given by at least one of `budgets`, `tokens` and `tokens_per_parameter`; each goes with every size."""

    base: Text  # a config that every run is made from: a path, or a name under configs/
    settings: dict[Text, Any] = Field(default_factory=dict)  # of all runs, by dotted key, such as model.parametrization
    folder: LocalPath  # of the runs, their configs, results and the page
    sizes: Annotated[dict[Name, SizeConfig], Field(min_length=1, max_length=64)]
    budgets: Annotated[tuple[Budget, ...], Field(max_length=64)] = ()  # model FLOPs of a run (IsoFLOP)
    tokens: Annotated[tuple[Tokens, ...], Field(max_length=64)] = ()
    tokens_per_parameter: Annotated[tuple[PositiveFloat, ...], Field(max_length=64)] = ()
    least_ratio: PositiveFloat = 1e-3  # tokens per parameter of a budget's runs; others are left out
    most_ratio: PositiveFloat = 1e4
    warmup: Fraction | None = None  # share of the run; None: the base's warm-up
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1, max_length=64)] = (0,)
    fit: FitConfig = FitConfig()
    compare: CompareConfig | None = None  # for `maxlm ladder --compare`

    @model_validator(mode="after")
    def _has_lengths(self) -> "LadderSettings":
        lengths = len(self.budgets) + len(self.tokens) + len(self.tokens_per_parameter)
        if not lengths:
            raise ConfigError(
                "budgets", None, "says no length", "give budgets, tokens or tokens_per_parameter, such as tokens_per_parameter: [20]"
            )
        for field in ("budgets", "tokens", "tokens_per_parameter", "seeds"):
            values = getattr(self, field)
            if len(set(values)) < len(values):
                raise ConfigError(field, list(values), "names a value twice", "name each once")
        if self.least_ratio > self.most_ratio:
            raise ConfigError("least_ratio", self.least_ratio, f"is above most_ratio = {self.most_ratio:g}", "lower it")
        if (runs := math.prod((len(self.sizes), lengths, len(self.seeds)))) > MOST_RUNS:
            raise ConfigError("sizes", f"{runs:,} runs", f"are more than {MOST_RUNS:,}", "name fewer sizes, lengths or seeds")
        return self

    def given(self) -> Iterator[tuple[str, str]]:
        """(field, dotted key) of each setting, also where sections are nested: settings of all runs, then of each size."""
        of_sizes = ((f"sizes.{name}.settings", size.settings) for name, size in self.sizes.items())
        for field, settings in (("settings", self.settings), *of_sizes):
            yield from ((field, key) for key, _ in flatten(settings))
