"""Metrics to trackio: a local database, a server or a Hugging Face Space. The package is an extra, imported when it is used."""

import importlib.util
import os
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from maxlm.base.errors import ConfigError
from maxlm.base.installing import install_command
from maxlm.config.sections.trackio import TrackioConfig
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.tracker import Tracker, digest_of

SPACE, SERVER, TOKEN = "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WRITE_TOKEN"


class TrackioObserver(Tracker):
    """Log figures to a run of trackio, named by the run's name and a digest of its folder: trackio finds a run by its name alone.

    Without a network, trackio keeps figures for a server in its local database and sends them later.
    """

    @classmethod
    def from_config(cls, trackio: TrackioConfig, directory: RunDirectory, settings: Mapping[str, Any]) -> Self:
        """The observer of the section `trackio`."""
        return cls(trackio.project, directory, settings)

    @classmethod
    def check(cls, trackio: TrackioConfig) -> None:
        """Raise ConfigError without the package, and for the address of a server that trackio would refuse."""
        spec = importlib.util.find_spec("trackio")
        if spec is None or spec.origin is None:  # a folder of that name is no package
            raise ConfigError(
                "trackio.project", trackio.project, "the package trackio is not installed", f"run {install_command('trackio')}"
            )
        address = os.environ.get(SERVER)
        if not address or os.environ.get(SPACE):  # the Space takes precedence
            return
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            rule = f"{SERVER} in the environment is no address of a server"
            raise ConfigError("trackio.project", trackio.project, rule, "set it to http://HOST:PORT or https://HOST, or unset it")
        if not os.environ.get(TOKEN) and "write_token" not in parse_qs(parts.query):
            rule = f"{SERVER} is set in the environment, and {TOKEN} is not"
            raise ConfigError("trackio.project", trackio.project, rule, f"set {TOKEN} to the server's token, or unset {SERVER}")

    def connect(self) -> Any:
        """Start or resume the run of trackio, without its dashboard and its own readings of the machine."""
        import trackio

        name = f"{self.directory.path.resolve().name}-{digest_of(self.directory)[:6]}"
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        return trackio.init(project=self.project, name=name, config=dict(self.config), resume="allow", **quiet)

    def log(self, run: Any, figures: Mapping[str, Any]) -> None:
        """Log figures at their step; after a rollback steps decrease."""
        run.log({name: value for name, value in figures.items() if name != "step"}, step=figures["step"])
