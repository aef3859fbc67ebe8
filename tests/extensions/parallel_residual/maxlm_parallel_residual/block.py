"""The residual rule."""

from collections.abc import Mapping
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from maxlm.config.schema import ModelConfig
from maxlm.models.layers import Norm
from maxlm.models.residual import ResidualRule, Sublayer


class Parallel(ResidualRule):
    """x + multiplier * (sum of f(norm(x)) over the sublayers f); the norm belongs to the first."""

    def modules(self, config: ModelConfig, sublayer: str) -> dict[str, nnx.Module | None]:
        return {"norm": Norm(config.d_model, config)} if sublayer == "attention" else {}

    def __call__(
        self, modules: Mapping[str, Mapping[str, Any]], x_BSD: Float[Array, "B S D"], sublayers: Mapping[str, Sublayer]
    ) -> tuple[Float[Array, "B S D"], dict[str, Any]]:
        normed_BSD = modules["attention"]["norm"](x_BSD)
        outputs = {name: sublayer(normed_BSD) for name, sublayer in sublayers.items()}
        return x_BSD + self.multiplier * sum(y_BSD for y_BSD, _ in outputs.values()), {name: rest for name, (_, rest) in outputs.items()}
