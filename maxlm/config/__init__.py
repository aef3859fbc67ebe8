"""Settings: the schema, the loader, the rules and the error they raise. Imports no jax, and what reads configs only where one is read."""

import importlib
from typing import TYPE_CHECKING, Any

from maxlm.base.errors import ConfigError, UserError

if TYPE_CHECKING:
    from maxlm.config.loader import LoadedConfig, load
    from maxlm.config.schema import Config

__all__ = ["Config", "ConfigError", "LoadedConfig", "UserError", "load"]


def __getattr__(name: str) -> Any:
    homes = {"Config": "schema", "LoadedConfig": "loader", "load": "loader"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{homes[name]}"), name)
