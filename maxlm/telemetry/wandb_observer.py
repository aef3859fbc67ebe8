"""Metrics to Weights & Biases, or to files for `wandb sync`. The package is an extra, imported when it is used."""

import importlib.util
import netrc
import os
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import urlsplit

from maxlm.base.errors import ConfigError
from maxlm.base.installing import install_command
from maxlm.config.sections.wandb import WandbConfig
from maxlm.telemetry.observer import CLOSE_S
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.tracker import Tracker, digest_of


def check_wandb(project: str) -> None:
    """Raise ConfigError without the package, or without the API key, which only WANDB_MODE=offline makes unnecessary."""
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:  # a folder named wandb, which wandb itself makes, is no package
        raise ConfigError("wandb.project", project, "the package wandb is not installed", f"run {install_command('wandb')}")
    if os.environ.get("WANDB_MODE", "online") == "online" and not _has_key():
        rule = "no API key was found in WANDB_API_KEY or ~/.netrc"
        raise ConfigError("wandb.project", project, rule, "run `wandb login`, or set WANDB_MODE=offline in the environment")


class WandbObserver(Tracker):
    """Log figures to a run at Weights & Biases."""

    @classmethod
    def from_config(cls, wandb: WandbConfig, directory: RunDirectory, settings: Mapping[str, Any]) -> Self:
        """The observer of the section `wandb`."""
        return cls(wandb.project, directory, settings)

    @classmethod
    def check(cls, wandb: WandbConfig) -> None:
        """Raise ConfigError as `check_wandb`."""
        check_wandb(wandb.project)

    def log(self, run: Any, figures: Mapping[str, Any]) -> None:
        """Log figures; `step` is the horizontal axis of all."""
        run.log(dict(figures))

    def connect(self) -> Any:
        """Start or resume the W&B run. Raises OSError if the service is not reached."""
        import wandb

        path = self.directory.path.resolve()
        try:
            run = wandb.init(
                project=self.project,
                name=path.name,
                id=digest_of(self.directory),
                resume="allow",
                dir=str(path),
                config=dict(self.config),
                settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False, finish_timeout=CLOSE_S),
            )
        except wandb.errors.AuthenticationError:
            raise
        except wandb.errors.CommError as error:
            raise OSError(f"Weights & Biases is not reached: {error}") from error
        run.define_metric("*", step_metric="step")  # their own step counter cannot decrease after a rollback
        return run


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
