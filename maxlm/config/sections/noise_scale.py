"""The gradient noise scale, measured in training."""

from maxlm.config.capability import Capability, Problems, Sizes
from maxlm.config.fields import Positive, Section


class NoiseScaleConfig(Section):
    """Measure the gradient noise scale (arXiv 1812.06162). It costs the norm of each microbatch's gradient."""

    updates: Positive = 100
    """Updates over which the measured noise scale is averaged, as the time constant of a moving average. Unit: updates."""


def _problems(
    settings: NoiseScaleConfig, train_microbatches: int, diloco: object, compression: object, precision_scaling: object
) -> Problems:
    """A measurement that compares the parts of a batch with the whole."""
    if train_microbatches == 1:
        rule = "compares microbatches with the whole batch, and train.microbatches = 1"
        yield "train.noise_scale", "set", rule, "use 2 microbatches or more"
    others = {
        "diloco": (diloco, "has a gradient for each worker, and none of the whole batch"),
        "compression": (compression, "changes the gradient of the whole batch"),
        "precision.loss_scale": (precision_scaling, "multiplies gradients"),
    }
    for field, (section, rule) in others.items():
        if section is not None:
            yield "train.noise_scale", "set", f"does not go together with {field}, which {rule}", "remove one of them"


def _on_mesh(settings: NoiseScaleConfig, sizes: Sizes) -> Problems:
    if sizes["stage"] > 1:
        rule = f"needs the gradient of each microbatch, and the pipeline of mesh.stage = {sizes['stage']} forms their sum"
        yield "train.noise_scale", "set", rule, "remove it, or use mesh.stage=1"


CAPABILITY = Capability(
    key="train.noise_scale",
    rules=(_problems,),
    mesh_rules=(_on_mesh,),
    transforms=("maxlm.training.noise_scale:PartNorms",),
    readers=("maxlm.training.noise_scale:NoiseScale",),
)
