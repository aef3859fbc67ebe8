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
    """Width of the hidden states of this size. Unit: dims."""
    n_layers: Positive
    """Layers of this size. Unit: layers."""
    n_heads: Positive | None = None
    """Query heads of this size; null: with the head_dim of the base config. Unit: heads."""
    n_kv_heads: Positive | None = None
    """Key and value heads of this size; null: with the n_heads / n_kv_heads of the base config. Unit: heads."""
    d_ff: Positive | None = None
    """Hidden width of the feed-forward layers of this size; null: with the d_ff / d_model of the base config. Unit: dims."""
    settings: dict[Text, Any] = Field(default_factory=dict)
    """Other settings of this size alone, by dotted key, such as optimizer.peak_lr."""


class FitConfig(Section):
    """Settings of the fit."""

    form: Literal["chinchilla", "kaplan", "compute"] | None = None
    """Law that is fitted. chinchilla: loss = E + A / N^alpha + B / D^beta of size N and tokens D (arXiv 2203.15556); kaplan: the form of
    arXiv 2001.08361; compute: the loss over training FLOPs. null: chinchilla where sizes have several lengths, else compute.
    """
    parameters: Literal["all", "without_embeddings"] = "all"
    """Parameters that count as the size of a model. all: all of them; without_embeddings: without the tables of tokens and positions."""
    huber: PositiveFloat = 1e-2
    """Error from which on it counts linearly rather than by its square. Unit: logarithm of the loss."""
    samples: Annotated[int, Field(strict=True, ge=20, le=10_000)] = 200
    """Samples of the bootstrap that gives the intervals of the fit. Unit: samples."""


class ContestantConfig(Section):
    """Values that are tried for one optimizer, each with each: as many trials for all."""

    peak_lr: Annotated[tuple[PositiveFloat, ...], Field(min_length=1, max_length=64)]
    """Peak learning rates that are tried, as many for each optimizer. Unit: learning rate."""
    settings: dict[Text, Any] = Field(default_factory=dict)
    """Other settings of this optimizer, by dotted key, such as optimizer.muon.momentum."""


class CompareConfig(Section):
    """A comparison of optimizers, each tuned with equal trials at every size, at the shortest of the ladder's lengths."""

    optimizers: Annotated[dict[Name, ContestantConfig], Field(min_length=2, max_length=16)]
    """Optimizers that are compared, by `optimizer.name`, each with the values that are tried for it."""
    warmup: Annotated[tuple[Fraction, ...], Field(min_length=1, max_length=16)] | None = None
    """Lengths of the warm-up that are tried with every optimizer, as shares of the run; null: the ladder's `warmup`, else the base
    config's. Unit: share.
    """
    weight_decay: Annotated[tuple[NonNegative, ...], Field(min_length=1, max_length=16)] | None = None
    """Weight decays that are tried with every optimizer; null: the base config's. Unit: factor of the learning rate."""
    seeds: Annotated[tuple[Seed, ...], Field(min_length=2, max_length=64)] = (1, 2, 3)
    """Seeds of the final runs with the best values of each optimizer; trials have the seed 0. Unit: seed."""

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

    base: Text
    """Config that every run is made from: a path, or a name under configs/."""
    settings: dict[Text, Any] = Field(default_factory=dict)
    """Settings of all runs over the base config, by dotted key, such as model.parametrization."""
    folder: LocalPath
    """Folder of the runs, their configs, the results and the page about them."""
    sizes: Annotated[dict[Name, SizeConfig], Field(min_length=1, max_length=64)]
    """Sizes of the models, by name."""
    budgets: Annotated[tuple[Budget, ...], Field(max_length=64)] = ()
    """Compute budgets, each spent with every size (IsoFLOP profiles, arXiv 2203.15556). Unit: model FLOPs of a run."""
    tokens: Annotated[tuple[Tokens, ...], Field(max_length=64)] = ()
    """Lengths of the runs, each with every size. Unit: tokens."""
    tokens_per_parameter: Annotated[tuple[PositiveFloat, ...], Field(max_length=64)] = ()
    """Lengths of the runs as multiples of the number of parameters, each with every size. Unit: tokens a parameter."""
    least_ratio: PositiveFloat = 1e-3
    """Runs of a budget with fewer tokens a parameter are left out. Unit: tokens a parameter."""
    most_ratio: PositiveFloat = 1e4
    """Runs of a budget with more tokens a parameter are left out. Unit: tokens a parameter."""
    warmup: Fraction | None = None
    """Length of the warm-up as a share of each run; null: the warm-up of the base config. Unit: share."""
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1, max_length=64)] = (0,)
    """Seeds with which every size and length is trained. Unit: seed."""
    fit: FitConfig = FitConfig()
    """Law that is fitted to the losses, and how it is fitted."""
    compare: CompareConfig | None = None
    """Values that are tried for each optimizer by `maxlm ladder --compare`; null: no comparison."""

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
