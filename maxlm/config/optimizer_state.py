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
    rounding: Literal["stochastic", "nearest"] = (
        "stochastic"  # up or down by chance, so that the mean is exact; a function of (seed, update)
    )
    # split: bfloat16 halves that matmuls read, and the other 16 bits apart; split24: 8 bits apart, 3 bytes in all
    masters: Literal["float32", "split", "split24"] = FLOAT32

    @property
    def second(self) -> str:
        """Format of the second moment."""
        return self.second_moment or self.moments

    @property
    def identity(self) -> dict[str, str]:
        """Settings that change the leaves of the state, where they are not float32."""
        formats = {"moments": self.moments, "second_moment": self.second, "masters": self.masters}
        return {f"optimizer.state.{name}": value for name, value in formats.items() if value != FLOAT32}
