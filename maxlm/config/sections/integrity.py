"""Checks for silent corruption by a device."""

from maxlm.config.capability import Capability, Problems, Sizes
from maxlm.config.fields import Positive, Section
from maxlm.hardware.topologies import is_tpu


class IntegrityConfig(Section):
    """Checks for silent corruption by a device. Copies of the state are compared before every save, too."""

    every_steps: Positive = 100
    """Updates between two comparisons of the copies of parameters and optimizer state on different devices. Unit: updates."""
    replay_every: Positive | None = None
    """Updates after which devices repeat each other's work and compare the results; null: never. Unit: updates."""
    repeat_every: Positive | None = None
    """Updates after which an update is computed a second time, from a copy of the state, and compared; null: never. Unit: updates."""


def on_mesh(settings: IntegrityConfig, sizes: Sizes, diloco: object) -> Problems:
    """Checks that find nothing to compare on a mesh of these `sizes`. A run that has lost hosts goes on without them on such a mesh."""
    copied = (sizes["data"] > 1 and diloco is None) or sizes["context"] > 1 or sizes["tensor"] > 1
    cells = sizes["data"] * sizes["stage"] * sizes["fsdp"]
    if settings.replay_every is not None and cells == 1:
        rule = "needs several devices along mesh.data, mesh.stage or mesh.fsdp, which repeat each other's work"
        yield "integrity.replay_every", settings.replay_every, rule, "leave it out"
    if settings.replay_every is None and settings.repeat_every is None and not copied:
        fix = "set integrity.replay_every" if cells > 1 else "set integrity.repeat_every"
        yield "integrity", "set", "no device of this mesh holds a copy of another's parameters", fix


def on_platform(settings: IntegrityConfig, *, gpu: bool) -> Problems:
    """Checks that need equal bits of equal work, on GPUs."""
    if gpu and settings.repeat_every is not None:
        rule = "needs equal bits from equal numbers, and on GPUs XLA sums the embedding's gradient in any order"
        yield "integrity.repeat_every", settings.repeat_every, rule, "leave it out"


CAPABILITY = Capability(
    key="integrity",
    chip_rules=(lambda settings, chip: on_platform(settings, gpu=not is_tpu(chip)),),
    full_mesh_rules=(on_mesh,),
    opening=("maxlm.training.integrity:PossibleChecks",),
)
