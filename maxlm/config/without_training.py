"""The config of a model that is only computed with: what `maxlm eval` and `maxlm generate` need, on a mesh of their own."""

from collections.abc import Mapping, Sequence
from typing import Any

from maxlm.base.errors import UserError, show
from maxlm.config import rules
from maxlm.config.loader import COMMAND_LINE, validate
from maxlm.config.schema import Config, ModelConfig

Settings = Mapping[str, Mapping[str, Any]]  # by section


def command_line(overrides: Sequence[str], sections: Sequence[str], refusal: str) -> dict[str, dict[str, Any]]:
    """The settings `section.name=value` of a command line, by section. Raises UserError with the reason `refusal` for any other text."""
    found: dict[str, dict[str, Any]] = {section: {} for section in sections}
    for text in overrides:
        key, equals, value = text.partition("=")
        section, dot, name = key.strip().partition(".")
        if section not in sections or not dot or not equals:
            raise UserError(f"{show(text)}{refusal}")
        value = value.strip()
        found[section][name] = int(value) if value.removeprefix("-").isdecimal() and len(value) < 20 else value
    return found


def without_training(model: ModelConfig, seq_len: int, devices: int, chosen: Settings, inherited: Settings | None = None) -> Config:
    """The config of `model` with a row of `seq_len` tokens on each of so many devices, and the settings `chosen` on a command line.

    `inherited`: settings of the training, which `chosen` overrides. No other setting of the training is read, so none of its rules can
    refuse a mesh that has nothing to do with it. Raises ConfigError.
    """
    sections = {name: {**(inherited or {}).get(name, {}), **settings} for name, settings in chosen.items()}
    values: dict[str, Any] = {
        "model": model.model_dump(mode="json"),
        "data": {"store": "unused", "seq_len": seq_len},
        "train": {"steps": 1, "global_batch": devices, "loss_chunks": 1},
        **sections,
    }
    sources = {f"{section}.{name}": COMMAND_LINE for section, settings in chosen.items() for name in settings}
    config = validate(values, sources)
    rules.check(config, sources)
    return config
