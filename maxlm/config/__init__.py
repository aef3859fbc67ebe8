"""Settings: the schema, the loader, the rules and the error they raise. Imports no jax."""

from maxlm.config.errors import ConfigError, UserError
from maxlm.config.loader import LoadedConfig, load
from maxlm.config.schema import Config

__all__ = ["Config", "ConfigError", "LoadedConfig", "UserError", "load"]
