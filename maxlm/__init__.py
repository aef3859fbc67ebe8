"""maxlm: pretraining for transformers in JAX. Names other than the version are imported on use, since most of them need jax."""

from importlib import import_module
from typing import Any

__version__ = "0.2.0.dev0"
_API = {"load_config": "maxlm.config.loader:load", "register": "maxlm.config.table:register"}


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _API[name].partition(":")
    return getattr(import_module(module), attribute)
