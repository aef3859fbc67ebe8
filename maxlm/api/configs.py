"""`maxlm.load_config`: settings from a file, a run, another config or a program's own mapping. Imports no jax."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from maxlm.api.errors import plain_errors
from maxlm.base.errors import UserError
from maxlm.config import loader
from maxlm.config.schema import Config

Source = str | os.PathLike[str] | Mapping[str, Any] | Config
_log = logging.getLogger(__name__)


@plain_errors
def load_config(source: Source, *overrides: str) -> Config:
    """Load and check a config.

    Args:
        source: a path, a name under `configs/` such as "runs/quickstart", the folder of a run, another config, or nested mappings such as
            `{"extends": "runs/quickstart", "train": {"steps": 100}}`.
        overrides: settings over it, as on the command line: "train.steps=100", "model.n_layers=2".

    Raises UserError: a name, a value or a rule between settings is broken.
    """
    loaded = loader.read(config_source(source), checked(overrides))
    for note in loaded.notes:
        _log.warning("note: %s", note)
    return loaded.config


def config_source(source: Source) -> loader.ConfigSource:
    """`source` as the loader takes it."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if not isinstance(source, Mapping | Config):
        raise UserError(f"a config is a name, a path, a Config or a mapping of sections, and not {type(source).__name__}.")
    return source


def checked(overrides: tuple[str, ...]) -> tuple[str, ...]:
    """`overrides`, if they are all texts."""
    if wrong := next((text for text in overrides if not isinstance(text, str)), None):
        raise UserError(f'{wrong!r} is no setting: write "key=value", such as "train.steps=100".')
    return overrides
