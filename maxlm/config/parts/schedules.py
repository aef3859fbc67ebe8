"""The shapes of the learning rate after warm-up (docs/explanation/optimizers.md)."""

from maxlm.config.capability import Inert
from maxlm.config.part import Part, ScheduleFacts

PARTS = (
    Part(
        kind="schedule",
        name="cosine",
        place="maxlm.training.schedules:cosine",
        about="A half cosine down to `end_lr_fraction` at the end of the run.",
    ),
    Part(
        kind="schedule",
        name="wsd",
        place="maxlm.training.schedules:wsd",
        about="Warm-up, stable, linear decay in the last `decay_steps` (MiniCPM, arXiv 2404.06395).",
        facts=ScheduleFacts("at_end"),
    ),
    Part(
        kind="schedule",
        name="constant",
        place="maxlm.training.schedules:constant",
        about="The peak until the end.",
        inert=lambda own: iter([Inert("optimizer.end_lr_fraction", "optimizer.schedule = constant never decays", "use another schedule")]),
        facts=ScheduleFacts("never"),
    ),
)
