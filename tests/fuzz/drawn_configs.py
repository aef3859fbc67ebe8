"""Random valid configs of tiny models on random valid meshes, drawn from the schema of the settings.

A value comes from its setting's type and bounds, so that a setting which is added later is drawn without an edit here. `VALUES` holds the
values of sizes, which must be small and divide each other; `NOT_DRAWN` lists the settings that are not drawn, and why.
"""

import copy
import math
import random
import re
import types
from collections.abc import Container, Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML

from maxlm.config import ConfigError, rules
from maxlm.config.choices import Choice
from maxlm.config.schema import Config
from maxlm.config.sections.mesh import AXES

Values = dict[str, Any]
Setting = tuple[str, FieldInfo]
MOST_DEVICES = 8
MOST_REPAIRS = 20  # settings that are drawn again until a config is valid
BASE: Values = {
    "model": {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 64},
    "data": {"store": "unused", "seq_len": 16},
    "train": {"steps": 4, "global_batch": 8, "loss_chunks": 2},
    "optimizer": {"peak_lr": 1e-2, "eps": 0.1},
    "mesh": {"fsdp": 1},
    "precision": {"compute": "float32"},
}
NUMBERS = (0, 1e-3, 0.01, 0.1, 0.25, 0.5, 0.9, 1, 1.5, 2, 4)
WHOLE = (0, 1, 2, 3, 4, 8)
FACTORS = tuple(tuple(1.0 + (pair % 3) / 2 for pair in range(pairs)) for pairs in (2, 4, 8))
PATTERNS = (("local",), ("global", "local"), ("local", "global"), ("local", "local", "global"))
VALUES: dict[str, Sequence[Any]] = {
    **{f"mesh.{axis}": (1, 2, 2, 4, 8) for axis in AXES},
    "mesh.slices": (1, 2),
    "model.vocab_size": (64, 128),
    "model.d_model": (16, 32, 64),
    "model.n_layers": (1, 2, 3, 4),
    "model.n_heads": (2, 4, 8),
    "model.n_kv_heads": (1, 2, 4, 8),
    "model.head_dim": (4, 8, 16),
    "model.d_ff": (32, 64),
    "model.init_std": (0.02, 0.1, 0.3),
    "model.norm_eps": (1e-6, 1e-3),
    "model.layer_pattern": PATTERNS,
    "model.window": (3, 6, 12),
    "model.attention_scale": (0.2, 0.5),
    "model.learned_positions.max_seq_len": (16, 32),
    "model.latent.q_rank": (8, 16),
    "model.latent.kv_rank": (8, 16),
    "model.latent.nope_dim": (4, 8),
    "model.latent.rope_dim": (4, 8),
    "model.latent.value_dim": (4, 8, 16, 24),
    "model.lora.rank": (2, 4),
    "model.moe.n_experts": (2, 4, 8),
    "model.moe.top_k": (1, 2),
    "model.moe.d_ff": (16, 32),
    "model.moe.n_shared": (0, 1, 2),
    "model.moe.n_dense": (0, 1),
    "model.moe.router.groups": (1, 2, 4),
    "model.moe.router.top_groups": (1, 2),
    "model.moe.router.capacity": (1.0, 1.5),
    "model.mtp.depth": (1, 2),
    "model.parametrization.base_width": (8, 16, 32),
    "model.parametrization.base_depth": (1, 2),
    "model.parametrization.base_head_dim": (4, 8),
    "model.softcap.attention": (1.0, 5.0),
    "model.softcap.logits": (1.0, 5.0),
    **{f"model.{rope}.theta": (100.0, 10000.0) for rope in ("rope", "rope_local")},
    **{f"model.{rope}.scaling.original_seq_len": (4, 8, 16) for rope in ("rope", "rope_local")},
    **{f"model.{rope}.scaling.{length}_factor": FACTORS for rope in ("rope", "rope_local") for length in ("short", "long")},
    "data.seq_len": (16, 32),
    "train.steps": (4, 6, 10),
    "train.global_batch": (8, 16),
    "train.microbatches": (1, 2, 4),
    "train.loss_chunks": (1, 2, 4),
    "train.start_from": ({"path": "unused"},),
    "train.batch_ramp.global_batch": (4, 8),
    "train.batch_ramp.until_tokens": (64, 128),
    "optimizer.peak_lr": (1e-3, 1e-2),
    "optimizer.eps": (1e-4, 1e-2),
    "optimizer.clip_norm": (0.1, 1.0, 100.0),
    "optimizer.warmup_steps": (0, 1, 2),
    "optimizer.warmup_tokens": (0, 128, 256),
    "optimizer.decay_tokens": (128, 256),
    "optimizer.muon.iterations": (2, 5),
    "optimizer.soap.every": (1, 2),
    "optimizer.soap.largest": (32, 64, 128),
    "objective.beta": (0.1, 0.7),
    "compression.warmup_steps": (1, 2),
    "compression.density": (2**-8, 2**-4),
    "diloco.workers": (2, 4),
    "diloco.every": (1, 2, 3),
    "memory.offload_state.optimizer": ("host",),
    "memory.offload_state.master": ("host",),
}
_FILES = "names files or stores: batches are random, and no file is read or written"
_OUTSIDE = "acts outside of the step: it observes the run, or moves between updates what they leave"
_ROUNDED = "results on different layouts are compared in float32: in fewer bits a rounding error shows as a difference"
_HEALTH = "is read by the loop, between updates"
_DATA = "says how samples are read, and batches are random here"
NOT_DRAWN = {
    **dict.fromkeys(("data.store", "data.mixture", "data.prepare", "data.eval", "train.branch_from"), _FILES),
    **dict.fromkeys(("data.shuffle", "data.read_threads", "data.prefetch", "data.skip_bad_chunks"), _DATA),
    **dict.fromkeys(("train.eval_every", "train.eval_batches"), "is read by the loop; every case evaluates one batch"),
    "train.tokens": "the other way to give train.steps",
    "extensions": "names modules of installed packages",
    "memory.offload_state.nvme": _FILES,
    **dict.fromkeys(("precision.compute", "precision.matmul", "precision.dispatch", "precision.loss_scale"), _ROUNDED),
    **dict.fromkeys(("checkpoint", "run", "cluster", "integrity", "samples", "watchdog", "wandb", "trackio"), _OUTSIDE),
    **dict.fromkeys(("prometheus", "evaluation"), _OUTSIDE),
    **dict.fromkeys(("cost", "memory_checkpoints", "elastic"), _OUTSIDE),
    **dict.fromkeys((f"health.{name}" for name in ("spreads", "spike_steps", "roll_backs", "recent_roll_backs", "recent_steps")), _HEALTH),
    **dict.fromkeys(("health.leave_out", "health.activations_every", "health.not_finite"), _HEALTH),
}


class CannotDrawError(Exception):
    """A setting has a type of which no value can be drawn."""


def settings(section: type[BaseModel] = Config, prefix: str = "", left_out: Container[str] = NOT_DRAWN) -> Iterator[Setting]:
    """(dotted key, its field) of every setting that is drawn: numbers, choices, lists, optional sections, and settings inside sections."""
    for name, info in section.model_fields.items():
        key = prefix + name
        if key in left_out:
            continue
        inner = sections_in(info.annotation)
        if info.annotation not in inner:  # a section that is always there has no value of its own
            yield key, info
        if key not in VALUES and not _is_list(info.annotation):
            yield from {field: found for one in inner for field, found in settings(one, f"{key}.", left_out)}.items()


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is tuple or any(_is_list(kind) for kind in get_args(annotation))


def sections_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a setting of this type may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in sections_in(inner)]


def draw(rng: random.Random, key: str, annotation: Any, bounds: Sequence[Any] = (), default: Any = None) -> Any:
    """A value of the setting `key`. Raises CannotDrawError for a type that has no values to choose from, such as text."""
    origin = get_origin(annotation)
    if key in VALUES and origin is not tuple:
        return rng.choice(VALUES[key])
    if origin is Annotated:
        inner, *further = get_args(annotation)
        further = [bound for one in further for bound in (one.metadata if isinstance(one, FieldInfo) else [one])]
        return draw(rng, key, inner, [*bounds, *further], default)
    if origin in (Union, types.UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return draw(rng, key, rng.choice(kinds), bounds, default)
    if (choice := next((bound for bound in bounds if isinstance(bound, Choice)), None)) is not None:
        return rng.choice(choice.names)
    if origin is Literal:
        return rng.choice(get_args(annotation))
    if origin is tuple:
        return _draw_tuple(rng, key, annotation, bounds)
    if annotation is bool:
        return rng.choice((True, False))
    if annotation in (int, float):
        near = [default / 2, default * 2] if isinstance(default, float) and default else []
        choices = [one for one in (*(WHOLE if annotation is int else NUMBERS), *near) if _within(one, bounds)]
        if choices:
            return annotation(rng.choice(choices))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _draw_section(rng, key, annotation)
    raise CannotDrawError(f"{key}: values of {annotation} cannot be drawn: give some in VALUES, or a reason in NOT_DRAWN")


def _draw_tuple(rng: random.Random, key: str, annotation: Any, bounds: Sequence[Any]) -> list[Any]:
    if key in VALUES:
        return list(rng.choice(VALUES[key]))
    least = max((bound.min_length for bound in bounds if isinstance(bound, MinLen)), default=0)
    most = min((bound.max_length for bound in bounds if isinstance(bound, MaxLen)), default=3)
    found: list[Any] = []
    for _ in range(rng.randint(max(least, 1), max(least, min(most, 3)))):
        one = draw(rng, key, get_args(annotation)[0])
        found += [one] if one not in found else []
    return found


def _within(number: float, bounds: Sequence[Any]) -> bool:
    kept = {Ge: lambda bound: number >= bound.ge, Gt: lambda bound: number > bound.gt}
    kept |= {Le: lambda bound: number <= bound.le, Lt: lambda bound: number < bound.lt}
    return all(kept[type(bound)](bound) for bound in bounds if type(bound) in kept)


def _draw_section(rng: random.Random, key: str, section: type[BaseModel]) -> Values:
    """What the section needs, and each of its other settings in one case of three."""
    found = {}
    for name, info in section.model_fields.items():
        if f"{key}.{name}" in NOT_DRAWN:
            continue
        if info.is_required() or rng.random() < 1 / 3:
            found[name] = draw_field(rng, f"{key}.{name}", info)
    return found


def draw_field(rng: random.Random, key: str, info: FieldInfo) -> Any:
    """A value of a setting, never null."""
    return draw(rng, key, info.annotation, info.metadata, info.default)


SETTINGS = dict(settings())
NAMED = re.compile(r"\b([a-z]+(?:\.[a-z_0-9]+)+)(?: ?= ?([a-z0-9_.]+[a-z0-9_]))?")  # a setting in a message, with a value or without


def build(values: Values) -> Config:
    """The config, checked with the size of its mesh as if a person had written it. Raises ConfigError or pydantic's ValidationError."""
    config = Config.model_validate(values)
    rules.check(config, {})
    rules.check_devices(config, devices_of(config))
    return config


def devices_of(config: Config) -> int:
    """Devices of the mesh. Raises ConfigError if there are not so many."""
    devices = math.prod(config.mesh.sizes().values())
    if not 1 <= devices <= MOST_DEVICES:
        axis = max(AXES, key=config.mesh.sizes().__getitem__)
        raise ConfigError(f"mesh.{axis}", devices, f"makes more than {MOST_DEVICES} devices", "lower it")
    return devices


def problem(values: Values) -> tuple[str, str] | None:
    """(the setting that the first broken rule names, the whole message); None if the config is valid."""
    try:
        build(values)
    except ValidationError as error:
        return ".".join(str(part) for part in error.errors()[0]["loc"]), ""
    except ConfigError as error:
        return error.field, str(error)
    return None


def get(values: Values, key: str) -> Any:
    """The value of a dotted key, None where it is absent."""
    found: Any = values
    for name in key.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def put(values: Values, key: str, value: Any) -> None:
    """Set a dotted key, or with None take it out, and what has become empty on the way."""
    *path, name = key.split(".")
    place = values
    for part in path:
        if not isinstance(place.get(part), dict):
            place[part] = {}
        place = place[part]
    if value is None:
        place.pop(name, None)
        if path and not place:
            put(values, ".".join(path), None)
    else:
        place[name] = value


def _nearest(key: str, keys: Sequence[str]) -> str | None:
    """The setting of `keys` that `key`, named by a rule, is or is inside of; kinds of a union are parts of pydantic's names."""
    parts = [part for part in key.split(".") if not part.isdigit()]
    for end in range(len(parts), 0, -1):
        for skipped in range(end, -1, -1):  # a part that names the kind of a section is no key
            name = ".".join((*parts[: skipped - 1], *parts[skipped:end])) if skipped else ".".join(parts[:end])
            if name in keys:
                return name
    return None


def changed(rng: random.Random, values: Values, key: str, keys: Sequence[str] = tuple(SETTINGS)) -> Values | None:
    """Valid settings with another value of `key`, or None. What a broken rule names is drawn again, taken out, or set as its fix says."""
    found = copy.deepcopy(values)
    put(found, key, draw_field(rng, key, SETTINGS[key]))
    for _ in range(MOST_REPAIRS):
        broken = problem(found)
        if broken is None:
            return found
        field, message = broken
        said = [(name, value) for name, value in NAMED.findall(message) if name in keys]
        other = _nearest(field, keys)
        choices = [*said, *([(other, "")] if other else [])]
        if not choices:
            return None
        name, value = rng.choice(choices)
        if value and not message.startswith(f"{name} = {value}"):
            put(found, name, YAML(typ="safe").load(value))
        else:
            again = [draw_field(rng, name, SETTINGS[name]) for _ in range(2)]
            put(found, name, rng.choice((*again, get(BASE, name), None)))
    return None


def with_changes(rng: random.Random, values: Values, keys: Sequence[str], number: int) -> Values:
    """Valid settings of which `number` of `keys`, at most, were drawn."""
    for _ in range(number):
        present = [key for key in keys if all(get(values, parent) for parent in _parents(key))]
        values = changed(rng, values, rng.choice(present), keys) or values
    return values


def _parents(key: str) -> list[str]:
    """The optional sections that a setting is inside of, which are drawn as a whole first."""
    parts = key.split(".")
    return [parent for end in range(1, len(parts)) if (parent := ".".join(parts[:end])) in SETTINGS]


MESH = tuple(key for key in SETTINGS if key.split(".")[0] in ("mesh", "pipeline"))
OTHERS = tuple(key for key in SETTINGS if key not in MESH)


def drawn(rng: random.Random) -> Values:
    """Settings of a valid config on a mesh of 2 to 8 devices."""
    while True:
        values = with_changes(rng, copy.deepcopy(BASE), OTHERS, rng.randint(4, 16))
        values = with_changes(rng, values, MESH, 12)
        values = with_changes(rng, values, (*OTHERS, *MESH), 6)
        if devices_of(build(values)) > 1:
            return values
