"""Formats of the optimizer's state and of the master weights (docs/optimizer_state.md)."""

from typing import Literal

from maxlm.config.fields import Section

MomentFormat = Literal["float32", "bfloat16", "int8"]
FLOAT32: Literal["float32"] = "float32"


class OptimizerStateConfig(Section):
    """State in fewer bytes. Absent: float32. Vectors (norms, biases) and routers are float32 in any case."""

    # int8: 8-bit codes of a dynamic map, a float32 scale for each block of a dim (Dettmers 2021, arXiv 2110.02861). Of Muon its momentum.
    moments: MomentFormat = FLOAT32
    # None: as `moments`. factored: row and column means, whose product stands for a matrix (Adafactor, arXiv 1804.04235).
    second_moment: MomentFormat | Literal["factored"] | None = None
    # stochastic: up or down by chance, so that the mean is exact; a function of (seed, update). None: as the format needs it, int8 moments
    # to the nearest code (they drift less so), bfloat16 moments and split24 masters stochastic.
    rounding: Literal["stochastic", "nearest"] | None = None
    # split: bfloat16 halves that matmuls read, and the other 16 bits apart; split24: 8 bits apart, 3 bytes in all
    masters: Literal["float32", "split", "split24"] = FLOAT32

    @property
    def second(self) -> str:
        """Format of the second moment."""
        return self.second_moment or self.moments

    def rounds_by_chance(self, format: str) -> bool:
        """True if values stored in `format` (of a moment or of masters) are rounded stochastically."""
        return self.rounding == "stochastic" if self.rounding is not None else format != "int8"

    @property
    def identity(self) -> dict[str, str]:
        """Settings that change the leaves of the state, where they are not float32."""
        formats = {"moments": self.moments, "second_moment": self.second, "masters": self.masters}
        return {f"optimizer.state.{name}": value for name, value in formats.items() if value != FLOAT32}
