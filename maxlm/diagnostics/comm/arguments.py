"""Arguments of `maxlm bench-comm`. Imports no jax: errors are instant."""

from collections.abc import Collection, Sequence

from maxlm.config.errors import UserError

OF_COLLECTIVES = ("operation", "smallest", "largest")
OF_TRAINING = ("topology", "slices", "steps")


def check_options(given: Collection[str], *, during_training: bool) -> None:
    """Raise UserError for an option that has no meaning with, or without, --during-training."""
    wrong = next((name for name in (OF_COLLECTIVES if during_training else OF_TRAINING) if name in given), None)
    if wrong is not None:
        fix = "leave one of them out" if during_training else "add that, or leave it out"
        raise UserError(f"--{wrong}: is only for bench-comm {'without' if during_training else 'with'} --during-training; {fix}.")


def split_config(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split into (CONFIG, settings). Raises UserError for several configs."""
    names = [one for one in arguments if "=" not in one]
    if len(names) > 1:
        raise UserError(f"{' and '.join(names)}: give one CONFIG, and settings as key=value.")
    return names[0] if names else None, [one for one in arguments if "=" in one]


def one_config(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """`split_config`, where a config must be named."""
    name, settings = split_config(arguments)
    if name is None:
        raise UserError("--during-training: needs a CONFIG to train, such as runs/quickstart; add one.")
    return name, settings
