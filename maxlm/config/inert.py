"""Settings without effect in a config. One that somebody set is refused, since the run would not do what its config says."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from maxlm.config.errors import Problem
from maxlm.config.schema import Config
from maxlm.hardware.topologies import parse

STDLIB = "python-stdlib"  # the one source of data.prepare that is no file


class Inert(NamedTuple):
    """A setting without effect in a config: the reason, and a change that would use it."""

    field: str
    why: str
    use: str


def problems(config: Config) -> Iterator[Problem]:
    """Problems of settings that are not at their defaults and that nothing reads."""
    for inert in settings(config):
        value, default = _value_and_default(config, inert.field)
        if value != default:
            text = value.model_dump(exclude_defaults=True) if isinstance(value, BaseModel) else value
            yield inert.field, text, f"does nothing, since {inert.why}", f"leave it at {_text(default)}, its default, or {inert.use}"


def settings(config: Config) -> Iterator[Inert]:
    """Settings that nothing reads in this config."""
    yield from (*_model(config), *_training(config), *_mesh(config), *_data(config))


def _model(config: Config) -> Iterator[Inert]:
    model = config.model
    if "global" not in model.layer_pattern and model.rope_local is not None and not model.mtp_depth:
        yield Inert("model.rope", "model.layer_pattern has no global layer, and model.rope_local is set", "add `global` layers")
    if model.learned_positions is not None:
        yield Inert("model.rope", "positions are learned", "remove model.learned_positions")
        yield Inert("model.rope_local", "positions are learned", "remove model.learned_positions")
    if model.moe is not None and model.moe.router.groups > 1 and model.moe.router.top_groups == model.moe.router.groups:
        router = "model.moe.router"
        yield Inert(f"{router}.groups", f"{router}.top_groups = {model.moe.router.top_groups} are all of them", "lower top_groups")


def _training(config: Config) -> Iterator[Inert]:
    for name in ("muon", "soap", "ademamix", "adafactor"):
        if config.optimizer.name != name:
            yield Inert(f"optimizer.{name}", f"optimizer.name = {config.optimizer.name}", f"use optimizer.name={name}")
    if config.optimizer.name == "lion":
        yield Inert("optimizer.eps", "optimizer.name = lion divides by nothing", "use optimizer.name=adamw")
    if config.optimizer.name == "adafactor":
        why, use = "optimizer.name = adafactor has no first moment, and a decay of its own", "use optimizer.name=adamw"
        yield from (Inert(f"optimizer.{name}", why, use) for name in ("beta1", "beta2", "eps"))
    state = config.optimizer.state
    if state is not None and not {state.moments, state.second, state.masters} & {"bfloat16", "int8", "split24"}:
        yield Inert("optimizer.state.rounding", "optimizer.state stores nothing that would be rounded", "set optimizer.state.moments")
    if config.health is not None and config.health.layers is None:
        yield Inert("health.activations_every", "health.layers is not set", "set health.layers=warn")
    if config.optimizer.schedule == "constant":
        yield Inert("optimizer.end_lr_fraction", "optimizer.schedule = constant never decays", "use another schedule")
    compute = config.precision.compute
    if compute != "float32":
        yield Inert("precision.float32_matmul", f"it is for float32, and precision.compute = {compute}", "use precision.compute=float32")
    if compute != "float16":
        yield Inert("precision.loss_scale", f"it is for float16, and precision.compute = {compute}", "use precision.compute=float16")


def _mesh(config: Config) -> Iterator[Inert]:
    mesh = config.mesh
    if mesh.slices == 1:
        yield Inert("mesh.across_slices", "mesh.slices = 1, so no axis crosses slices", "raise mesh.slices")
    if mesh.context == 1:
        yield Inert("mesh.context_attention", "mesh.context = 1 splits no sequence", "raise mesh.context")
    if mesh.expert == 1 and config.model.moe is not None:
        yield Inert("precision.dispatch", "mesh.expert = 1, so that no token travels", "raise mesh.expert")
    if mesh.fsdp == mesh.expert == 1:
        yield Inert("mesh.zero", "mesh.fsdp = 1 splits nothing", "raise mesh.fsdp")
    if config.cluster is None:
        return
    topology = parse(config.cluster.topology, mesh.slices)
    if (topology.slices if topology.is_tpu else topology.hosts) == 1:
        unit = "slice" if topology.is_tpu else "node"
        yield Inert("cluster.network_gbit_per_s", f"{topology.name} is one {unit}, which no network leaves", f"name several {unit}s")


def _data(config: Config) -> Iterator[Inert]:
    prepare = config.data.prepare
    if prepare is None:
        return
    if prepare.tokenizer.path is not None:
        for name in ("vocab_size", "train_bytes"):
            field = f"data.prepare.tokenizer.{name}"
            yield Inert(field, f"data.prepare.tokenizer.path = {prepare.tokenizer.path} is trained already", "remove the path")
    if prepare.conversations is not None:
        yield Inert("data.prepare.text_field", "data.prepare.conversations names the fields", "remove data.prepare.conversations")
    if set(prepare.sources) == {STDLIB}:
        yield Inert("data.prepare.text_field", f"{STDLIB} has no fields", "add other sources")


def _value_and_default(config: Config, field: str) -> tuple[Any, Any]:
    """Value and default of a dotted key."""
    section: BaseModel = config
    *path, name = field.split(".")
    for part in path:
        section = getattr(section, part)
    return getattr(section, name), type(section).model_fields[name].default


def _text(default: Any) -> Any:
    return "the default settings" if isinstance(default, BaseModel) else "null" if default is None else default
