"""Which experts a token meets, and how much each weighs: float32 from the logits on, on any mesh alike."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

# B batch, S sequence, D width, E experts, K choices of a token


class Routing(NamedTuple):
    """What routers did with the tokens of a batch, padding not counted: sums, so that those of microbatches add up.

    Of one layer; where a leading dim stands before these shapes, of the layers with experts in order of depth.
    """

    load_E: Int[Array, " E"]  # choices that fell on each expert, dropped ones included
    dropped: Int[Array, ""]  # choices that found no room
    tokens: Int[Array, ""]
    confidence: Float[Array, ""]  # of each token the largest score, where its scores are made to sum to 1
    entropy: Float[Array, ""]  # of those scores, nats
    unsound: Int[Array, ""]  # tokens whose logits are not all finite
    balance: Float[Array, ""]  # experts * sum(share of tokens * score) of each token; the mean is 1 when even
    z: Float[Array, ""]  # logsumexp(logits)^2
