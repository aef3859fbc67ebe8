"""Settings without effect in a config. One that somebody set is refused, since the run would not do what its config says."""

from collections.abc import Iterator

from pydantic import BaseModel

from maxlm.config.capability import Inert, value_of
from maxlm.config.errors import Problem
from maxlm.config.schema import Config
from maxlm.config.table import call, present


def problems(config: Config) -> Iterator[Problem]:
    """Problems of settings that are not at their defaults and that nothing reads."""
    for inert in settings(config):
        path, _, name = inert.field.rpartition(".")
        section = value_of(config, path)
        value, default = getattr(section, name), type(section).model_fields[name].default
        if value != default:
            text = value.model_dump(exclude_defaults=True) if isinstance(value, BaseModel) else value
            usual = "the default settings" if isinstance(default, BaseModel) else "null" if default is None else default
            yield inert.field, text, f"does nothing, since {inert.why}", f"leave it at {usual}, its default, or {inert.use}"


def settings(config: Config) -> Iterator[Inert]:
    """Settings that nothing reads in this config."""
    for one, section in present(config):
        yield from call(one.inert, config, section) if one.inert is not None else ()
