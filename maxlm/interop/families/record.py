"""The record of a published family: its keys of config.json, and its tensors. Export reads the same tables backwards."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from maxlm.config.schema import ModelConfig
from maxlm.interop.families.keys import Json, Keys, Row, Section, nested
from maxlm.interop.layouts import Rule


@dataclass(frozen=True)
class Limit:
    """A config.json that the Hugging Face library does not run, though it describes a model of ours.

    `key`: the key at fault, and `field`: our setting; `broken`: true of such a config; `fix`: the rule and what to do.
    """

    key: str
    field: str
    broken: Callable[[Mapping[str, Any]], bool]
    fix: str


@dataclass(frozen=True)
class Family:
    """One architecture of the Hugging Face library (`model_type`).

    `table`: keys of config.json and our settings; `rules`: tensors and our parameters; `defaults`: values of missing keys, where the
    library's differ from the table's. `ignored`: tensors without weights: name -> description. `copies`: tensors that must equal
    another: name -> the other. `prefix`: of all tensor names, which some files leave out. `states_positions`: it has the
    key `max_position_embeddings`, which no setting of ours is.
    """

    model_type: str
    architecture: str
    table: tuple[Row, ...]
    rules: Callable[[ModelConfig], tuple[Rule, ...]]
    defaults: Json = field(default_factory=dict)
    ignored: tuple[tuple[str, str], ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    prefix: str = ""
    limits: tuple[Limit, ...] = ()
    states_positions: bool = True

    def read(self, values: Json, source: str) -> Section:
        """Return our `model` section. Raises UserError naming the first key that is not supported."""
        keys, section = Keys({**self.defaults, **values}, source), Section()
        for row in self.table:
            row.read(keys, section)
        keys.finish()
        return nested(section)

    def write(self, config: ModelConfig) -> Json:
        """Return the config.json that states `config`, without facts that are not settings."""
        values: Json = {"model_type": self.model_type}
        for row in self.table:
            values |= row.write(config)
        return values

    def problems(self, values: Json) -> list[str]:
        """Return one line about each part of a config.json that the library cannot run."""
        whole = {**self.defaults, **values}
        return [f"{one.field} ({one.key} = {whole.get(one.key)}): {one.fix}" for one in self.limits if one.broken(whole)]
