"""Figures to Weights & Biases."""

from maxlm.config.capability import Capability
from maxlm.config.fields import Section, Text


class WandbConfig(Section):
    """Log figures to Weights & Biases too. WANDB_MODE=offline, WANDB_ENTITY and WANDB_API_KEY have their usual effect."""

    project: Text
    """Name of the project at Weights & Biases."""


CAPABILITY = Capability(key="wandb", observers=("maxlm.telemetry.wandb_observer:WandbObserver",))
