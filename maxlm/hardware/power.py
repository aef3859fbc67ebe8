"""Electric power of chips and their hosts, overhead of data centres and carbon of grids, each with its source. No jax here.

All figures were read in November 2026. None stands where nothing is published and nothing follows from what is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

_TPU_V4 = "mean of chip and HBM in MLPerf BERT, arXiv 2304.01433, table 6"
# Google's accelerators drew 0.14 Wh of a median prompt's 0.24 and their hosts 0.06: a share of serving, taken for training.
_TPU_HOST_SHARE = 0.06 / 0.14  # of the chip's power (arXiv 2508.15734)
_TPU_HOST = "host: 0.43 of the chip as in Google's serving (arXiv 2508.15734)"
# Ironwood's peak FLOP/s for a watt are nearly 30 times TPU v2's, which are 46 TFLOP/s for 280 W (arXiv 2304.01433), and twice Trillium's
# (blog.google, "Ironwood: the first Google TPU for the age of inference", April 2025). Trillium's efficiency is 1.67 times v5e's
# (cloud.google.com/blog, "Introducing Trillium", May 2024).
_IRONWOOD_FLOPS_PER_W = 30 * 46e12 / 280
_TRILLIUM_FLOPS_PER_W = _IRONWOOD_FLOPS_PER_W / 2
_RATIOS = "power at peak, by Google's ratios of efficiency"
_V5E_FLOPS_PER_W = _TRILLIUM_FLOPS_PER_W / 1.67
# A node of 8 H100 in training drew 8.4 kW at most where 10.2 kW are stated (arXiv 2412.08602): the same share is taken for other GPUs.
_NODE_SHARE = 8.4 / 10.2


@dataclass(frozen=True)
class Power:
    """Watts that one chip draws while it trains, and its share of its host: processors, memory, network, fans, losses of power supplies."""

    chip_w: float
    host_w: float
    estimated: bool  # derived from figures of other chips or other work, not published for this one
    source: str

    @property
    def total_w(self) -> float:
        """Watts of a chip with its share of the host, without the overhead of the data centre."""
        return self.chip_w + self.host_w


def _node(name: str, gpu_w: float, node_w: float, *, estimated: bool = True) -> Power:
    """A node of 8 GPUs: thermal design power of a GPU, and the maximum power that NVIDIA states for the node."""
    source = f"NVIDIA {name} data sheet: {gpu_w:,.0f} W a GPU, {node_w:,.0f} W the node; {_NODE_SHARE:.2f} of them (arXiv 2412.08602)"
    return Power(_NODE_SHARE * gpu_w, _NODE_SHARE * (node_w / 8 - gpu_w), estimated, source)


def _tpu(chip_w: float, source: str) -> Power:
    return Power(chip_w, _TPU_HOST_SHARE * chip_w, True, f"{source}; {_TPU_HOST}")


_A100 = replace(_node("DGX A100", 400, 6500), chip_w=380.0, source="GPU: MLPerf BERT, arXiv 2304.01433, table 6; host: as of DGX H100")

POWERS: Mapping[str, Power] = {  # by the name of the chip; v5p is missing, since nothing is published
    "v4": _tpu(197.0, _TPU_V4),
    "v5e": _tpu(197e12 / _V5E_FLOPS_PER_W, _RATIOS),
    "v6e": _tpu(918e12 / _TRILLIUM_FLOPS_PER_W, _RATIOS),
    "tpu7x": Power(
        4614e12 / _IRONWOOD_FLOPS_PER_W,
        10e6 / 9216 - 4614e12 / _IRONWOOD_FLOPS_PER_W,
        True,
        f"{_RATIOS}; with its host, nearly 10 MW for 9,216 chips (blog.google)",
    ),
    "A100-40GB": _A100,
    "A100-80GB": _A100,
    "H100": _node("DGX H100", 700, 10_200, estimated=False),
    "H200": _node("DGX H200", 700, 10_200),
    "B200": _node("DGX B200", 1000, 14_300),
}


@dataclass(frozen=True)
class Site:
    """Overhead of a provider's data centres: energy of the whole over that of the machines (PUE)."""

    pue: float
    estimated: bool
    source: str


SITES: Mapping[str, Site] = {
    "google": Site(1.09, False, "mean of Google's data centres in 2024 (datacenters.google/efficiency)"),
    "aws": Site(1.15, False, "mean of Amazon's data centres in 2023 (datacenterdynamics.com, December 2024)"),
}
ANY_SITE = Site(1.56, True, "mean of all data centres (Uptime Institute, global survey 2024)")  # of providers that state none


def site_of(provider: str | None, *, tpu: bool) -> Site:
    """Overhead where a chip is; TPUs are Google's, also those that no provider has a price for."""
    return SITES.get(provider.lower() if provider else "google" if tpu else "", ANY_SITE)


# Mean of the grid in kg of CO2 equivalent a kWh, whatever a provider buys besides. Regions of Google Cloud: its table for 2025
# (github.com/GoogleCloudPlatform/region-carbon-info). us-east-1 of AWS is on the grid of Northern Virginia, that of us-east4.
GRIDS: Mapping[str, float] = {
    "asia-northeast1": 0.449,
    "asia-southeast1": 0.366,
    "europe-west4": 0.194,
    "us-central1": 0.432,
    "us-central2": 0.417,
    "us-east1": 0.579,
    "us-east4": 0.343,
    "us-east5": 0.343,
    "us-south1": 0.299,
    "us-west1": 0.098,
    "us-west4": 0.360,
    "us-east-1": 0.343,
    "us": 0.373,  # of the United States: EPA, eGRID2022, 823 lb/MWh
}
