"""Sections about the compression of gradients where they cross slow links: between slices, or between workers of local updates."""

from typing import Annotated, Literal

from pydantic import Field

from maxlm.config.fields import Count, Float, Positive, Section


class Int8Compression(Section):
    """8 bits a number, with a scale for every 256, and feedback of the errors (arXiv 1809.07599): half the bytes of bfloat16, a quarter of
    float32's. The optimizer stays as it is.
    """

    kind: Literal["int8"]
    warmup_steps: Count = 0  # updates that are summed as without compression

    @property
    def wire_bits(self) -> float:
        """Bits a number that a stage sends, scales included; as a sum without compression, a compressed one has two stages."""
        return 8 + 32 / 256


class SignCompression(Section):
    """One bit a number of Adam's momentum, with a scale for every 1024 (1-bit Adam, arXiv 2102.02888). After the warm-up, which is Adam as
    ever, its second moments stay as they are then.
    """

    kind: Literal["sign"]
    warmup_steps: Positive  # the paper takes a seventh to a fifth of the run

    @property
    def wire_bits(self) -> float:
        """As of `Int8Compression`."""
        return 1 + 32 / 1024


class TopKCompression(Section):
    """The largest of every 4096 accumulated changes, with momentum (Deep Gradient Compression, arXiv 1712.01887): 4 bytes for each that is
    sent. After the warm-up Adam's second moments stay as they are then, as in 1-bit Adam.
    """

    kind: Literal["top_k"]
    warmup_steps: Positive
    density: Annotated[Float, Field(ge=2**-12, le=2**-4)] = 2**-6  # share of the numbers that are sent at the end
    ramp_steps: Count = 0  # updates after the warm-up in which the density falls from 1/4, by a factor of 4 at a time; 0: at once

    @property
    def wire_bits(self) -> float:
        """As of `Int8Compression`, between two devices; between n it is n / 2 times that, since each sends to all."""
        return 32 * self.density


CompressionConfig = Annotated[Int8Compression | SignCompression | TopKCompression, Field(discriminator="kind")]
