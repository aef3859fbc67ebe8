"""Checks of one drawn config: the same figures on its mesh, resumed on another one, without the loop over layers, and in evaluation.

A difference beyond `FLOOR` is compared with what noise of a few units of float32's rounding does to the same config on the same mesh: where
an update rule or a router's choice is not continuous, layouts may differ by as much as that (docs/explanation/parallelism.md).
"""

import copy
import functools
import random
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import drawn_configs
import jax
import numpy as np
from drawn_configs import MESH, Values, build, devices_of, put, with_changes
from pydantic import ValidationError

from maxlm.config import UserError
from maxlm.config.schema import Config
from maxlm.data import marks
from maxlm.objectives import with_reference
from maxlm.parallel import build_mesh
from maxlm.training import fits
from maxlm.training.noise_scale import PART_METRICS
from maxlm.training.program import Program, build_program
from maxlm.training.step import TrainState

STEPS, RESUMED_AT = 3, 2
FLOOR = 1e-5  # largest relative difference: the target of docs/lab/parallelism.md
NOISE, DRAWS, AMPLIFIED = 2.0**-18, 2, 4  # relative change of every parameter before every update; runs with it; the bound in multiples
END_OF_DOCUMENT = 0
PARTS_SEEN = {metric.name for metric in PART_METRICS}  # figures of single microbatches: a mesh decides how many there are
Figures = list[dict[str, np.ndarray]]  # of every update, as float64


@dataclass(frozen=True)
class Case:
    """Settings of a config; and the mesh with its pipeline, and perhaps other microbatches, on which its run goes on."""

    values: Values
    other: Values

    @property
    def moved(self) -> Values:
        """The settings of the run that goes on."""
        return with_mesh(self.values, self.other)


@dataclass(frozen=True)
class Failure:
    """A check that failed, and how."""

    check: str
    told: str


def with_mesh(values: Values, other: Values) -> Values:
    """The settings with the mesh, pipeline and microbatches of `other`."""
    found = {name: copy.deepcopy(section) for name, section in values.items() if name not in ("mesh", "pipeline")}
    found |= copy.deepcopy({name: section for name, section in other.items() if name != "train"})
    put(found, "train.microbatches", other.get("train", {}).get("microbatches"))
    return found


def draw_case(seed: str) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    values = drawn_configs.drawn(rng)
    keys = tuple(key for key in MESH if key not in kept_axes(values))
    keys += () if sees_microbatches(build(values)) else ("train.microbatches",)
    moved = with_changes(rng, values, keys, 10)
    other = {name: moved[name] for name in ("mesh", "pipeline") if name in moved}
    put(other, "train.microbatches", moved["train"].get("microbatches"))
    return Case(values, other)


def kept_axes(values: Values) -> tuple[str, ...]:
    """Settings of the mesh that are part of the algorithm: compressed sums have blocks of each device's share, and feedback on it."""
    return tuple(key for key in MESH if key.startswith("mesh.") and "context" not in key) if values.get("compression") else ()


def sees_microbatches(config: Config) -> bool:
    """True if the loss depends on the number of microbatches: a router's losses over all tokens of one, or a measurement of them."""
    router = None if config.model.moe is None else config.model.moe.router
    balanced = router is not None and router.balance_loss > 0 and router.balance_over == "batch"
    return balanced or config.train.noise_scale is not None


def on_one_device(values: Values) -> Values:
    """The settings on one device, or on as few as compute the same by definition."""
    mesh = {name: value for key in kept_axes(values) if (value := values["mesh"].get(name := key.partition(".")[2])) is not None}
    return with_mesh(values, {"mesh": {"fsdp": 1, **mesh}, "train": {"microbatches": values["train"].get("microbatches")}})


# --- a run


@functools.lru_cache(maxsize=8)
def _program(text: str) -> Program:
    config = Config.model_validate_json(text)
    return build_program(config, build_mesh(config, jax.devices()[: devices_of(config)]))


def program_of(values: Values) -> Program:
    """The program of these settings, the same one for the same settings. Raises ConfigError for an invalid config."""
    return _program(build(values).model_dump_json(exclude_unset=True))


def forget() -> None:
    """Free all programs: those of one case are of no use to the next."""
    _program.cache_clear()
    jax.clear_caches()


def batch_of(program: Program, number: int) -> Any:
    """Batch `number` of random documents, conversations or pairs, with rows that are full, half full, and one that is empty."""
    sized = program.of_size(program.config.batch_sizes.of(number))
    rng, objective = np.random.default_rng(number), sized.objective
    rows, width, vocab = objective.config.train.global_batch, objective.config.data.seq_len + 1, objective.config.model.vocab_size
    lengths, samples = np.full(rows, width), np.arange(rows) + number * rows
    lengths[3], lengths[2] = width // 2, 0 if number else width
    content = program.config.objective_facts.content
    if content == "text":
        window = rng.integers(1, vocab, (rows, width)).astype(np.int32)
        window[rng.random(window.shape) < 0.1] = END_OF_DOCUMENT
        return objective.make_batch(window, lengths, samples, END_OF_DOCUMENT)
    window, pairs = np.zeros((rows, width), np.uint32), []
    segments = 2 if content == "preferences" else 3
    for row in range(rows):
        size = min(int(lengths[row]), width - 1) // segments
        parts = [marks.segment(rng.integers(1, vocab, size), np.arange(size) >= 2) for _ in range(segments if size > 2 else 0)]
        lengths[row] = sum(map(len, parts))
        window[row, : lengths[row]] = np.concatenate([np.zeros(0, np.uint32), *parts])
        pairs.append(np.arange(len(pairs), len(pairs) + 1) if parts else np.zeros(0, np.int64))
    batch = objective.make_batch(window, lengths, samples, END_OF_DOCUMENT)
    return with_reference(batch, pairs, rng.normal(-9, 1, (rows, 2)).astype(np.float32)) if content == "preferences" else batch


def put_on(program: Program, state: TrainState) -> TrainState:
    """A state of the host on the devices of `program`, as a checkpoint is restored. A copy: a step overwrites it."""
    return program.placement.adopt(jax.device_put(jax.tree.map(np.array, state), program.state_shardings))


def updates(program: Program, state: TrainState, first: int, last: int, noise: int | None = None) -> tuple[Figures, list[TrainState]]:
    """(figures, state on the host) after each update from number `first` to before `last`. `noise`: seed of noise, if there is any."""
    figures, states = [], []
    rng = np.random.default_rng(noise)
    with jax.set_mesh(program.mesh):
        for number in range(first, last):
            if noise is not None:
                state = _with_noise(state, rng)
            on_mesh = put_on(program, state)
            after, metrics = program.step(on_mesh, jax.device_put(batch_of(program, number), program.batch_sharding))
            state = jax.device_get(after)
            values = {name: np.asarray(value, np.float64) for name, value in jax.device_get(metrics.values).items()}
            figures.append({name: value for name, value in values.items() if name not in PARTS_SEEN})
            states.append(state)
    return figures, states


def _with_noise(state: TrainState, rng: np.random.Generator) -> TrainState:
    """Multiply every parameter, also each DiLoCo worker's, by 1 plus noise; optimizer states and counters stay."""

    def shaken(path: tuple[Any, ...], leaf: np.ndarray) -> np.ndarray:
        names = jax.tree_util.keystr(path)
        if "params" not in names or "opt_state" in names or not np.issubdtype(leaf.dtype, np.floating):
            return leaf
        return (leaf * (1 + NOISE * rng.standard_normal(leaf.shape))).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(shaken, state)


def compared(state: TrainState) -> dict[str, np.ndarray]:
    """Arrays that layouts must agree on: parameters, balancing biases, averages. Optimizer states are judged by the parameters."""
    kept = {name: own for name, own in state.extra.items() if name in ("ema", "residual", "workers")}
    arrays = {"params": state.params, "model_state": state.model_state, "extra": kept}
    flat = jax.tree_util.tree_flatten_with_path(arrays)[0]
    named = {jax.tree_util.keystr(path): leaf for path, leaf in flat if np.issubdtype(leaf.dtype, np.floating)}
    return {name: np.asarray(leaf, np.float64) for name, leaf in named.items() if "opt_state" not in name}  # DiLoCo workers have one each


def everything(figures: Figures, states: list[TrainState]) -> dict[str, np.ndarray]:
    """Figures of every update and arrays of the last state, by name."""
    named = {f"{name} of update {number}": value for number, one in enumerate(figures) for name, value in one.items()}
    return named | compared(states[-1])


def difference(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> dict[str, float]:
    """Largest difference of each, relative to the largest number of what was wanted."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    apart = {}
    for name, value in wanted.items():
        largest = max(float(np.abs(value).max(initial=0)), 1e-30)
        equal = np.array_equal(found[name], value, equal_nan=True)
        apart[name] = 0.0 if equal else float(np.nan_to_num(np.abs(found[name] - value).max(initial=0) / largest, nan=np.inf))
    return apart


def beyond(apart: dict[str, float], noisy: Callable[[], list[dict[str, float]]]) -> str:
    """The largest differences above `FLOOR` and above those of noise; "" if there are none. `noisy` is computed only on need."""
    large = {name: value for name, value in apart.items() if not value <= FLOOR}
    if not large:
        return ""
    bounds = noisy()
    bound = {name: AMPLIFIED * max(one[name] for one in bounds) for name in large}
    worst = sorted((name for name in large if not large[name] <= bound[name]), key=lambda name: -large[name])
    return "; ".join(f"{name}: {large[name]:.1e} (noise {bound[name]:.1e})" for name in worst[:4])


# --- the checks


class Judged:
    """What is computed once of a case, for several checks."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.one = program_of(on_one_device(case.values))
        self.mesh = program_of(case.values)

    @functools.cached_property
    def first(self) -> TrainState:
        return jax.device_get(self.one.init())

    @functools.cached_property
    def alone(self) -> tuple[Figures, list[TrainState]]:
        """The updates on one device."""
        return updates(self.one, self.first, 0, STEPS)

    @functools.cached_property
    def spread(self) -> tuple[Figures, list[TrainState]]:
        """The updates on the mesh."""
        return updates(self.mesh, self.first, 0, STEPS)

    @functools.cached_property
    def noisy(self) -> list[tuple[Figures, list[TrainState]]]:
        """The updates on one device with noise."""
        return [updates(self.one, self.first, 0, STEPS, noise) for noise in range(DRAWS)]

    def noise_of(self, part: slice) -> list[dict[str, float]]:
        wanted = everything(self.alone[0][part], self.alone[1][part])
        return [difference(everything(figures[part], states[part]), wanted) for figures, states in self.noisy]


def same_on_the_mesh(judged: Judged) -> str:
    """Three updates on the mesh, and on one device."""
    apart = difference(everything(*judged.spread), everything(*judged.alone))
    assert all(np.isfinite(figures["loss"]) for figures in judged.alone[0]), "the loss is not finite on one device: draw smaller values"
    return beyond(apart, lambda: judged.noise_of(slice(None)))


def resumed(judged: Judged) -> str:
    """The third update on another mesh, perhaps in other microbatches, from the state after the second on the mesh."""
    went_on = updates(program_of(judged.case.moved), judged.spread[1][RESUMED_AT - 1], RESUMED_AT, STEPS)
    last = slice(RESUMED_AT, None)
    apart = difference(everything(*went_on), everything(judged.spread[0][last], judged.spread[1]))
    return beyond(apart, lambda: judged.noise_of(last))


def unrolled(judged: Judged) -> str:
    """One update without the loop over layers on one device: the same loss to the bit; gradients may be summed in another order."""
    values = on_one_device(judged.case.values)
    put(values, "memory.unroll", not judged.one.config.memory.unroll)
    try:
        program = program_of(values)
    except UserError:  # layers that pass through the device one by one
        return ""
    first = slice(1)
    figures, states = updates(program, judged.first, 0, 1)
    apart = difference(everything(figures, states), everything(judged.alone[0][first], judged.alone[1][first]))
    loss = apart["loss of update 0"]
    return f"loss: {loss:.1e}" if loss else beyond(apart, lambda: judged.noise_of(first))


def evaluated(judged: Judged) -> str:
    """One evaluation of the last state, on the mesh and on one device."""
    found = []
    for program in (judged.mesh, judged.one):
        state = program.evaluated(put_on(program, judged.alone[1][-1]))
        batch = batch_of(program, STEPS + 9)
        with jax.set_mesh(program.mesh):
            sums = program.evaluate(state.params, state.model_state, jax.device_put(batch, program.batch_sharding))
        found.append({name: np.asarray(value, np.float64) for name, value in sums.values(program.objective.metrics).items()})
    return beyond(difference(*found), lambda: [dict.fromkeys(found[0], 0.0)])


def bounded(judged: Judged) -> str:
    """The lower bound of memory by which runs are refused is below what the compiled steps hold."""
    told = []
    for program in (judged.one, judged.mesh):
        memory = program.step.memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
        sizes = dict(program.mesh.shape)
        parts = fits.least(program.config, sizes)
        ready = sum(part.bytes for part in parts if part.name.endswith("batches ready"))  # by the loop
        bound = sum(part.bytes for part in parts) - ready
        if bound > held:
            told.append(f"bound of {bound:,} bytes for a step of {held:,} on {sizes}")
    return "; ".join(told)


CHECKS: dict[str, Callable[[Judged], str]] = {check.__name__: check for check in (same_on_the_mesh, evaluated, bounded, resumed, unrolled)}


def failures(case: Case, names: tuple[str, ...] = tuple(CHECKS)) -> Iterator[Failure]:
    """Failures of the checks of a case. Raises UserError where a config is refused as its program is built."""
    judged = Judged(case)
    for name in names:
        try:
            told = CHECKS[name](judged)
        except (UserError, ValidationError):
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            yield Failure(name, f"{type(error).__name__} in {last.name}: {str(error)[:300]}")
            return  # a program that cannot be built fails in every check
        if told:
            yield Failure(name, told)
