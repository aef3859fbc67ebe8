"""Rules of `integrity`: checks that could compare nothing on a mesh or a platform."""

from collections.abc import Iterator, Mapping

from maxlm.config.errors import Problem
from maxlm.config.schema import Config


def on_mesh(config: Config, sizes: Mapping[str, int]) -> Iterator[Problem]:
    """Checks that find nothing to compare on a mesh of these `sizes`. A run that has lost hosts goes on without them on such a mesh."""
    settings = config.integrity
    if settings is None:
        return
    copied = (sizes["data"] > 1 and config.diloco is None) or sizes["context"] > 1 or sizes["tensor"] > 1
    cells = sizes["data"] * sizes["stage"] * sizes["fsdp"]
    if settings.replay_every is not None and cells == 1:
        rule = "needs several devices along mesh.data, mesh.stage or mesh.fsdp, which repeat each other's work"
        yield "integrity.replay_every", settings.replay_every, rule, "leave it out"
    if settings.replay_every is None and settings.repeat_every is None and not copied:
        fix = "set integrity.replay_every" if cells > 1 else "set integrity.repeat_every"
        yield "integrity", "set", "no device of this mesh holds a copy of another's parameters", fix


def on_platform(config: Config, *, gpu: bool) -> Iterator[Problem]:
    """Checks that need equal bits of equal work, on GPUs."""
    if gpu and config.integrity is not None and config.integrity.repeat_every is not None:
        rule = "needs equal bits from equal numbers, and on GPUs XLA sums the embedding's gradient in any order"
        yield "integrity.repeat_every", config.integrity.repeat_every, rule, "leave it out"
