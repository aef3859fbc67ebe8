"""Settings assumed for a model alone, whose files have no `data` and no `train`, so that it can be counted and compiled."""

from collections.abc import Mapping
from typing import Any

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
