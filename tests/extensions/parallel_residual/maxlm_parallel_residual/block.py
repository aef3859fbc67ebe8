"""The residual rule."""

from typing import Any

from flax import nnx

from maxlm.config.schema import ModelConfig
from maxlm.models.layers import Norm
from maxlm.models.residual import Modules, ResidualRule, Stream, Sublayers


class Parallel(ResidualRule):
    """x + multiplier * (sum of f(norm(x)) over the sublayers f); the norm belongs to the first."""

    def modules(self, config: ModelConfig, sublayer: str) -> dict[str, nnx.Module]:
        return {"norm": Norm(config.d_model, config)} if sublayer == "attention" else {}

    def __call__(self, modules: Modules, x_BSD: Stream, sublayers: Sublayers) -> tuple[Stream, dict[str, Any]]:
        normed_BSD = modules["attention_norm"](x_BSD)
        outputs = {name: sublayer(normed_BSD) for name, sublayer in sublayers.items()}
        return x_BSD + self.multiplier * sum(y_BSD for y_BSD, _ in outputs.values()), {name: rest for name, (_, rest) in outputs.items()}
