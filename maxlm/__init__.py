"""maxlm: pretraining for transformers in JAX.

The names of `__all__` are the public API, described in docs/reference/python.md; all else is private. They are imported on use, since
most of them need jax. `__init__.pyi` has their types.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0.dev0"
_API = {
    "Batch": "maxlm.data.batch:Batch",
    "Config": "maxlm.config.schema:Config",
    "Data": "maxlm.api.data:Data",
    "Event": "maxlm.telemetry.observer:Event",
    "FitResult": "maxlm.api.fit:FitResult",
    "Metrics": "maxlm.training.step:Metrics",
    "Model": "maxlm.api.model:Model",
    "Observer": "maxlm.telemetry.observer:Observer",
    "Plan": "maxlm.api.ahead:Plan",
    "Program": "maxlm.api.program:Program",
    "Run": "maxlm.api.runs:Run",
    "StepRecord": "maxlm.telemetry.observer:StepRecord",
    "StepReport": "maxlm.api.ahead:StepReport",
    "Table": "maxlm.api.table:Table",
    "TrainState": "maxlm.training.step:TrainState",
    "UserError": "maxlm.base.errors:UserError",
    "build": "maxlm.api.program:build",
    "compile_step": "maxlm.api.ahead:compile_step",
    "fit": "maxlm.api.fit:fit",
    "load_config": "maxlm.api.configs:load_config",
    "load_tokenizer": "maxlm.api.data:load_tokenizer",
    "pack_texts": "maxlm.api.data:pack_texts",
    "plan": "maxlm.api.ahead:plan",
    "register": "maxlm.config.table:register",
}
__all__ = ["__version__", *_API]  # noqa: PLE0604 -- names only


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _API[name].partition(":")
    found = getattr(import_module(module), attribute)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
