"""The usual residual connection, with norms before each sublayer, or before and after it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float

from maxlm.config.schema import ModelConfig
from maxlm.models.layers import Norm

# B batch, S sequence, D width


@dataclass(frozen=True)
class Additive:
    """x + multiplier * f(norm(x)); `sandwich` also norms the output of f (Gemma 2, arXiv 2408.00118)."""

    multiplier: float
    sandwich: bool

    @classmethod
    def from_config(cls, config: ModelConfig, *, ahead: bool) -> "Additive":
        """The rule of a block; `ahead`: in a multi-token prediction module, which CompleteP does not scale."""
        multiplier = config.residual_scale * (1.0 if ahead else config.parametrized.residual)
        return cls(multiplier, config.norm_position == "sandwich")

    def modules(self, config: ModelConfig) -> dict[str, Norm | None]:
        """Modules of a sublayer, by their names after the name of the sublayer."""
        return {"norm": Norm(config.d_model, config), "post_norm": Norm(config.d_model, config) if self.sandwich else None}

    def __call__(
        self, modules: Mapping[str, Any], x_BSD: Float[Array, "B S D"], sublayer: Callable[[Array], tuple[Array, Any]]
    ) -> tuple[Float[Array, "B S D"], Any]:
        """(hidden states after a sublayer, its second result)."""
        y_BSD, result = sublayer(modules["norm"](x_BSD))
        norm = modules["post_norm"]
        return x_BSD + self.multiplier * (y_BSD if norm is None else norm(y_BSD)), result
