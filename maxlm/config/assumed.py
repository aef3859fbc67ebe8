"""Settings that the loader fills in for a model alone, and settings that it changes for a shortened run."""

from collections.abc import Collection, Mapping
from typing import Any

from maxlm.config.schema import Config
from maxlm.hardware import topologies

ASSUMED = "assumed"
SEQ_LEN, STEPS, STORE = 4096, 100_000, "tokens"


def fill(merged: dict[str, Any], sources: dict[str, str]) -> None:
    """Add the required settings of `data` and `train` that `merged` lacks: one sequence a device, of 4,096 tokens or `max_seq_len`."""
    data, train = merged.setdefault("data", {}), merged.setdefault("train", {})
    if not isinstance(data, dict) or not isinstance(train, dict):
        return
    wanted: dict[str, Any] = {
        "data.seq_len": _seq_len(merged["model"]),
        "train.global_batch": _devices(merged) * _number(train.get("microbatches")),
    }
    if "store" not in data and "mixture" not in data:
        wanted["data.store"] = STORE
    if "steps" not in train and "tokens" not in train:
        wanted["train.steps"] = STEPS
    for key, value in wanted.items():
        section, _, name = key.partition(".")
        if name not in merged[section]:
            merged[section][name], sources[key] = value, ASSUMED


def fit_schedule(config: Config, shorter: Collection[str]) -> tuple[Config, dict[str, str]]:
    """Shorten warm-up and decay to the length of a run, for a smoke test of a long run's config. `shorter`: settings that came after the
    schedule, on the command line; nothing is changed unless the length is among them and the warm-up or decay is not. Returns the config
    and a sentence for each setting that was changed, by its dotted key.
    """
    if (config.train.steps is None) == (config.train.tokens is None):  # which the rules refuse
        return config, {}
    total, optimizer, decay = config.total_steps, config.optimizer, config.decay_steps
    lengths = {"warmup": config.warmup_steps, "decay": decay}
    fits = lengths["warmup"] < total and sum(lengths.values()) <= total
    if fits or not {"train.steps", "train.tokens"} & set(shorter) or config.train.branch_from is not None:
        return config, {}
    if decay and not any(key.startswith("optimizer.decay_") for key in shorter):
        decay = min(decay, max(total // 10, 1))
    wanted = {"decay": decay, "warmup": max(min(lengths["warmup"], total - max(decay, 1)), 0)}
    changed: dict[str, int | None] = {}
    sentences = {}
    for name, steps in wanted.items():
        given = next((unit for unit in ("steps", "tokens") if getattr(optimizer, f"{name}_{unit}") is not None), None)
        if given is None or steps == lengths[name] or f"optimizer.{name}_{given}" in shorter:
            continue
        changed |= {f"{name}_tokens": None, f"{name}_steps": steps}
        before = f"optimizer.{name}_{given} = {getattr(optimizer, f'{name}_{given}')}"
        rule = f"is longer than a run of {total} updates leaves room for"
        sentences[f"optimizer.{name}_steps"] = f"{before} {rule}: optimizer.{name}_steps={steps} is used."
    return config.model_copy(update={"optimizer": optimizer.model_copy(update=changed)}), sentences


def as_text(values: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """Assumed settings as `key=value`, separated by commas. `values`: all settings, flat."""
    return ", ".join(f"{key}={values[key]}" for key, source in sources.items() if source == ASSUMED)


def _seq_len(model: Any) -> int:
    learned = model.get("learned_positions") if isinstance(model, dict) else None
    return min(_number(learned.get("max_seq_len"), SEQ_LEN), SEQ_LEN) if isinstance(learned, dict) else SEQ_LEN


def _devices(merged: Mapping[str, Any]) -> int:
    """Number of devices of the cluster, all slices; 1 without one. The rules report what is wrong with it."""
    cluster, mesh = (merged.get(name) or {} for name in ("cluster", "mesh"))
    topology = cluster.get("topology") if isinstance(cluster, dict) else None
    slices = _number(mesh.get("slices") if isinstance(mesh, dict) else None)
    try:
        return topologies.parse(topology, slices).devices if isinstance(topology, str) else 1
    except topologies.TopologyError:
        return 1


def _number(value: Any, default: int = 1) -> int:
    return value if isinstance(value, int) and value > 0 else default
