"""Balance of the load on experts in one step, in numpy."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from maxlm.base.metric import Metric

# L layers with experts in order of depth, E experts; leading dims "..." are free


ROUTING_METRICS = (
    Metric("expert_load_max", "Load of the busiest expert", "times its even share, worst layer", console="load {:.2f}x"),
    Metric("expert_load_mean", "Load of the busiest expert", "times its even share, mean over layers"),
    Metric("expert_entropy", "Entropy of the load", "share of ln(experts), mean over layers"),  # 1 = even
    Metric("router_confidence", "Router confidence", "score of a token's first choice, mean"),  # over tokens and layers
    Metric("router_entropy", "Router entropy", "of a token's scores, nats, mean"),
    Metric("dropped", "Choices dropped", "share of all", console="drop {percent}"),
    Metric("balance_loss", "Balancing loss of routers", "before its weight, mean over layers"),  # 1 = even
    Metric("router_z", "Squared logsumexp of routers' logits", "mean over tokens and layers"),
)


@dataclass(frozen=True)
class Balance:
    """The routing of one step, layer by layer. `confidence`, `entropy`, `balance` and `z` are means over the layer's tokens."""

    first_layer: int  # the number, in the model, of the first layer with experts
    load_LE: NDArray[np.int64]  # choices that fell on each expert, dropped ones included
    tokens_L: NDArray[np.int64]
    dropped_L: NDArray[np.int64]  # choices dropped for want of capacity
    unsound_L: NDArray[np.int64]  # tokens with a logit that is not finite
    confidence_L: NDArray[np.float64]
    entropy_L: NDArray[np.float64]
    balance_L: NDArray[np.float64]
    z_L: NDArray[np.float64]

    @classmethod
    def from_sums(cls, first_layer: int, **sums: ArrayLike) -> "Balance":
        """From the sums of `maxlm.models.feed_forward.router.Routing`, by name, each with a leading dim of layers."""
        load_LE, tokens_L, dropped_L, unsound_L = (np.asarray(sums[name], np.int64) for name in ("load_E", "tokens", "dropped", "unsound"))
        means = (np.asarray(sums[name], np.float64) / np.maximum(tokens_L, 1) for name in ("confidence", "entropy", "balance", "z"))
        return cls(first_layer, load_LE, tokens_L, dropped_L, unsound_L, *means)

    @property
    def layers(self) -> range:
        """Numbers of the layers with experts, as the model counts."""
        return range(self.first_layer, self.first_layer + len(self.load_LE))

    def figures(self) -> dict[str, float]:
        """The figures of `ROUTING_METRICS`."""
        peak_L = peak(self.load_LE)
        return {
            "expert_load_max": float(peak_L.max()),
            "expert_load_mean": float(peak_L.mean()),
            "expert_entropy": float(evenness(self.load_LE).mean()),
            "router_confidence": float(self.confidence_L.mean()),
            "router_entropy": float(self.entropy_L.mean()),
            "dropped": float(self.dropped_L.sum() / max(int(self.load_LE.sum()), 1)),
            "balance_loss": float(self.balance_L.mean()),
            "router_z": float(self.z_L.mean()),
        }

    def to_dict(self) -> dict[str, Any]:
        """A line of `routing.jsonl` but for its step: `load` and `dropped` in choices, `confidence` and `entropy` a token, all by layer."""
        return {
            "load": self.load_LE.tolist(),
            "dropped": self.dropped_L.tolist(),
            "confidence": self.confidence_L.round(6).tolist(),
            "entropy": self.entropy_L.round(6).tolist(),
        }


def times_even(load: NDArray[Any]) -> NDArray[np.float64]:
    """(..., E): each expert's load over the mean of all; 1 where no expert met a token."""
    mean = load.mean(axis=-1, keepdims=True)
    return np.where(mean > 0, load / np.where(mean > 0, mean, 1), 1.0)


def peak(load: NDArray[Any]) -> NDArray[np.float64]:
    """(...): the busiest expert's load over the mean."""
    return times_even(load).max(axis=-1)


def effective_experts(load: NDArray[Any]) -> NDArray[np.float64]:
    """(...): exp(entropy of the load): the number of experts that would be as uneven if they shared the load evenly."""
    share = times_even(load) / load.shape[-1]
    return np.exp(-(share * np.log(np.where(share > 0, share, 1))).sum(axis=-1))


def evenness(load: NDArray[Any]) -> NDArray[np.float64]:
    """(...): entropy of the load over the most it could be, 0 to 1; 1 for a lone expert."""
    experts = load.shape[-1]
    return np.log(effective_experts(load)) / math.log(experts) if experts > 1 else np.ones(load.shape[:-1])


def collapsed(load_LE: NDArray[Any], tokens_L: NDArray[Any]) -> NDArray[np.bool_]:
    """True for each router that sends most tokens to the same few experts.

    Let each token choose K of E experts. Even, an expert is chosen by K/E of the tokens; collapsed, K experts by all. A router counts as
    collapsed when it is more than half way there by either measure: effectively fewer than sqrt(K E) experts share the load (half way
    from E to K in entropy), or one expert is chosen by more than (1 + K/E) / 2 of the tokens and takes twice its even share.
    The first cannot be while no expert takes more than sqrt(E/K) times its share, so neither fires for a mild skew.
    """
    experts = load_LE.shape[1]
    seen_L = tokens_L > 0
    counted_L = np.maximum(tokens_L, 1)
    top_k_L = load_LE.sum(axis=1) / counted_L
    few_L = effective_experts(load_LE) < np.sqrt(top_k_L * experts) * (1 - 1e-9)
    crowded_L = (load_LE.max(axis=1) / counted_L > (1 + top_k_L / experts) / 2) & (peak(load_LE) >= 2)
    return seen_L & (top_k_L < experts) & (few_L | crowded_L)
