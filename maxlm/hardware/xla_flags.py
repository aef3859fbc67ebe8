"""XLA flags as data: by platform, what is passed to a program's compile, and why. Never through the environment."""

from typing import NamedTuple


class Flag(NamedTuple):
    """A compiler option: its name, its value, and what it is for."""

    name: str
    value: bool | str
    why: str


FLAGS: dict[str, tuple[Flag, ...]] = {
    "cpu": (
        Flag(
            "xla_backend_optimization_level",
            "1",
            "the step is as fast as at 3 and compiled in 5/6 of the time; the initialisation, which runs once, in a third (jaxlib 0.10.2)",
        ),
    ),
}


def compiler_options(platform: str) -> dict[str, str | bool]:
    """The options of every program compiled for `platform` (as JAX names it)."""
    return {flag.name: flag.value for flag in FLAGS.get(platform, ())}
