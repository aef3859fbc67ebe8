"""Figures to Weights & Biases."""

from maxlm.config.capability import Capability
from maxlm.config.fields import Section, Text


class WandbConfig(Section):
    """Figures also go to Weights & Biases, whose own WANDB_MODE=offline, WANDB_ENTITY and WANDB_API_KEY count."""

    project: Text  # its name there


CAPABILITY = Capability(key="wandb")
