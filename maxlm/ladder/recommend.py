"""From a FLOP budget to a model: the size and length that a fitted ladder recommends, as settings over a config.

G candidate sizes.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field, Strict, ValidationError, model_validator

from maxlm.base.errors import UserError, error_kind, printable, quoted, shorten
from maxlm.base.paths import read_file
from maxlm.config.loader import COMMAND_LINE, load
from maxlm.config.schema import ModelConfig
from maxlm.ladder.analysis import doubts
from maxlm.ladder.fits import SHARE, Fit, limits
from maxlm.ladder.forms import FORMS, Runs
from maxlm.ladder.grid import ASSUMED, assumed, epochs, model_settings, parameters_of, resized
from maxlm.ladder.ladder_command import RESULT
from maxlm.ladder.settings import SizeConfig
from maxlm.models.counts import token_flops
from maxlm.telemetry.formatting import count

MOST_BYTES = 2**26  # of a fitted ladder

UNIT = 128  # widths are multiples of it, or of the head's width if larger: it fills matrix units
LARGEST = 65_536  # width
LENGTHS = ("steps", "tokens")  # fields of `train`
STEP = 1.07  # between two candidates' widths, at least: a fit is not more certain
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0)]


class _Run(BaseModel):
    flops: Positive
    parameters: Positive
    tokens: Positive
    epochs: Positive | None


class _Prediction(BaseModel):
    error: Number


class _Result(BaseModel):
    """`ladder.json`, as far as a recommendation reads it."""

    base: Annotated[str, Strict()]
    assumed: dict[str, Any]
    form: Literal["chinchilla", "kaplan", "compute"]
    parameters: Literal["all", "without_embeddings"]
    theta: list[Number]
    thetas: Annotated[list[list[Number]], Field(min_length=1)]
    centre: list[Number]
    runs: Annotated[list[_Run], Field(min_length=1)]
    predictions: list[_Prediction]

    @model_validator(mode="after")
    def _complete(self) -> "_Result":
        form = FORMS[self.form]
        constants, inputs = len(form.parameters), len(form.inputs(Runs(*[np.ones(1)] * 4)))
        if (
            {len(self.theta), *map(len, self.thetas)} != {constants}
            or len(self.centre) != inputs
            or not set(ASSUMED) <= self.assumed.keys()
        ):
            raise ValueError("not as many constants as the form has, or facts of the base are missing; fit the ladder again")
        return self

    def fit(self) -> Fit:
        """The fit, without the runs that it was made from."""
        empty = np.zeros(0)
        nothing = Runs(empty, empty, empty, empty)
        return Fit(FORMS[self.form], nothing, np.array(self.theta), np.array(self.thetas), tuple(self.centre), empty)


@dataclass(frozen=True)
class Recommendation:
    """Settings for `maxlm plan` and `maxlm compile`, the tokens they train for, and sentences about how they were found."""

    overrides: tuple[str, ...]
    tokens: int
    sentences: tuple[str, ...]


def recommend(folder: Path, name: str, overrides: Sequence[str], flops: float) -> Recommendation:
    """The size and length with the least predicted loss for `flops` model FLOPs, in the proportions of the config `name`.

    Raises UserError: no fitted ladder in `folder`, one that says nothing of other ratios, or a config with experts: the ladder does
    not tell their width.
    """
    if not (math.isfinite(flops) and flops > 0):
        raise UserError(f"--flops {flops} is not a number of FLOPs: give one such as 1e22.")
    loaded = load(name, overrides, any_mesh=True)
    base = loaded.config
    for key in LENGTHS:
        if loaded.source(f"train.{key}") == COMMAND_LINE:  # also by train={steps: 5}
            said = f"train.{key}={getattr(base.train, key)} does not go with --flops"
            raise UserError(f"{said}, by which the ladder tells the length of the run: leave it out.")
    result = _read(folder)
    found = result.fit()
    candidates = [
        (settings, (parameters, flops / token, flops, 1.0))
        for settings, parameters, token in _sizes(base.model, base.data.seq_len, result.parameters)
        if flops / token >= base.tokens_per_step
    ]
    if not candidates:
        raise UserError(f"--flops {flops:g} is too little for {name}: not one update of a model {UNIT} wide; give more.")
    grid = Runs(*(np.array(column, np.float64) for column in zip(*(one[1] for one in candidates), strict=True)))
    with np.errstate(over="ignore", invalid="ignore"):
        losses_G = found.predict(grid)
        best = int(losses_G.argmin())
        low_loss, high_loss = found.interval(grid.only(np.arange(len(losses_G)) == best), of_runs=False)
    if not np.isfinite([*losses_G, *low_loss, *high_loss]).all():
        raise _not_ours(folder)
    if candidates[best][0]["model.d_model"] >= LARGEST:
        raise UserError(f"--flops {flops:g}: the best model would be wider than {LARGEST:,}; give less.")
    settings, (parameters, tokens, _, _) = candidates[best]
    samples = [int(found.losses_with(theta_P, grid).argmin()) for theta_P in found.thetas_KP]
    low, high = (grid.parameters_R[round(float(place))] for place in limits(samples))
    sentences = [
        f"{flops:g} FLOPs, by the ladder of {quoted(result.base)}: {count(parameters)} parameters ({SHARE:.0%} interval {count(low)} to "
        f"{count(high)}), {count(tokens)} tokens ({tokens / parameters:.3g} a parameter); loss {losses_G[best]:.4g} "
        f"({low_loss[0]:.4g} to {high_loss[0]:.4g}).",
        "That is " + ", ".join(f"{key.removeprefix('model.')} {value}" for key, value in settings.items()) + ".",
    ]
    here = assumed(base.model_dump(mode="json", exclude_none=True))
    if others := [
        f"{key} = {printable(shorten(str(was)))} ({now} here)" for key, now in here.items() if (was := result.assumed[key]) != now
    ]:
        sentences.append(f"The ladder was trained with {', '.join(others)}: its losses do not hold for this config.")
    asked = {"flops": flops, "parameters": parameters, "tokens": tokens}
    largest = {name: max(getattr(run, name) for run in result.runs) for name in asked}
    if beyond := {name: value / largest[name] for name, value in asked.items() if value > 1.001 * largest[name]}:
        units = {"flops": "FLOPs"}
        most = ", ".join(
            f"{largest[name]:.3g} {units.get(name, name)} ({times_more:.2g} times less)" for name, times_more in beyond.items()
        )
        sentences.append(f"The ladder's runs have at most {most}: this is an extrapolation, and only as good as the form of the fit.")
    sentences += doubts(found, [one.error for one in result.predictions], [run.epochs for run in result.runs])
    if (again := epochs(base.data.stores, round(tokens))) is not None and again > 1:
        sentences.append(f"data.store has less text: it would be read {again:.3g} times, and the ladder tells nothing of repeated text.")
    if not min(best, *samples):
        sentences.append(f"None narrower than {candidates[0][0]['model.d_model']:,} was tried: a smaller model may be as good or better.")
    whole = max(1, round(tokens / base.tokens_per_step)) * base.tokens_per_step
    values = {**settings, "train.steps": None, "train.tokens": whole}
    return Recommendation(tuple(f"{key}={json.dumps(value)}" for key, value in values.items()), whole, tuple(sentences))


def _read(folder: Path) -> _Result:
    """Read the result of a fitted ladder. Raises UserError."""
    file = folder / RESULT
    try:
        result = _Result.model_validate(json.loads(read_file(file, MOST_BYTES)))
    except (ValidationError, OverflowError) as error:
        raise _not_ours(folder) from error
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise error_kind(error)(
            f"--ladder {folder}: {file} cannot be read ({reason}); give the `folder` of a ladder that was fitted."
        ) from error
    if result.form == "compute":
        raise UserError(
            f"--ladder {folder} was fitted at one ratio of tokens to parameters, and says nothing of others: train several lengths a size."
        )
    return result


def _not_ours(folder: Path) -> UserError:
    return UserError(
        f"--ladder {folder}: {folder / RESULT} was not written by this version of `maxlm ladder`; fit it anew with --no-train."
    )


def _widths(base: ModelConfig) -> list[int]:
    """Widths to try, smallest first."""
    if base.moe is not None:
        raise UserError(
            "--flops goes with dense models: a ladder does not tell how many experts a larger model has, and how wide they are."
        )
    unit = math.lcm(UNIT, base.head_dim)
    widths = [unit]
    while widths[-1] < LARGEST:
        widths.append(max(widths[-1] + unit, round(widths[-1] * STEP / unit) * unit))
    return widths


@lru_cache(maxsize=8)
def _sizes(base: ModelConfig, seq_len: int, kind: str) -> tuple[tuple[dict[str, int], float, float], ...]:
    """(settings, parameters, FLOPs of a token) of the model of each width, as deep as the proportions of `base` say."""
    found = []
    for width in _widths(base):
        settings = model_settings(base, SizeConfig(d_model=width, n_layers=max(1, round(width * base.n_layers / base.d_model))))
        model = resized(base, settings)
        found.append((settings, float(parameters_of(model, kind)), token_flops(model, seq_len)))
    return tuple(found)
