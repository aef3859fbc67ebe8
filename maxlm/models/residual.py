"""Residual rules: how the sublayers of a block are joined. `maxlm/config/parts/layers.py` lists them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from maxlm.config.schema import ModelConfig
from maxlm.models.layers import Norm

Stream = Float[Array, "B S D"]  # hidden states between sublayers
Modules = Mapping[str, Any]  # by name in the block
Sublayers = Mapping[str, Callable[[Array], tuple[Array, Any]]]  # hidden states to (output, second result: a cache, or a router's report)


class ResidualRule(ABC):
    """The rule of a block. `multiplier`: factor of the output of each sublayer. Rules with equal attributes are equal, since a rule is a
    static part of a block.
    """

    def __init__(self, multiplier: float) -> None:
        self.multiplier = multiplier

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), self.multiplier))

    @classmethod
    def from_config(cls, config: ModelConfig, *, ahead: bool) -> "ResidualRule":
        """Return the rule of a block; `ahead`: in a multi-token prediction module, which CompleteP does not scale."""
        return cls(config.residual_scale * (1.0 if ahead else config.parametrized.residual))

    @abstractmethod
    def modules(self, config: ModelConfig, sublayer: str) -> dict[str, nnx.Module]:
        """Return the modules of a sublayer, `attention`, `memory` or `mlp`, by their names. In the block, and in names of parameters, the
        name of the sublayer comes first, as in `attention_norm`.
        """

    @abstractmethod
    def __call__(self, modules: Modules, x_BSD: Stream, sublayers: Sublayers) -> tuple[Stream, dict[str, Any]]:
        """Return (hidden states after all sublayers, the second result of each). `modules`: of the block; `sublayers`: in order."""


class Additive(ResidualRule):
    """x + multiplier * f(norm(x)), a sublayer after another."""

    def modules(self, config: ModelConfig, sublayer: str) -> dict[str, nnx.Module]:
        return {"norm": Norm(config.d_model, config)}

    def __call__(self, modules: Modules, x_BSD: Stream, sublayers: Sublayers) -> tuple[Stream, dict[str, Any]]:
        results = {}
        for name, sublayer in sublayers.items():
            y_BSD, results[name] = sublayer(modules[f"{name}_norm"](x_BSD))
            norm = modules.get(f"{name}_post_norm")
            x_BSD = x_BSD + self.multiplier * (y_BSD if norm is None else norm(y_BSD))
        return x_BSD, results


class Sandwich(Additive):
    """`Additive` with a norm of the output of f, too (Gemma 2, arXiv 2408.00118)."""

    def modules(self, config: ModelConfig, sublayer: str) -> dict[str, nnx.Module]:
        return {**super().modules(config, sublayer), "post_norm": Norm(config.d_model, config)}
