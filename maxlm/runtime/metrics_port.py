"""The port for Prometheus: taken before a run begins, or else the run does not begin."""

from maxlm.cluster.agree import require_equal
from maxlm.config import Config
from maxlm.config.errors import ConfigError
from maxlm.telemetry.phases import Phases
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.text_server import BIND_AGAIN_S, TextServer


def metrics_server(config: Config, directory: RunDirectory, phases: Phases) -> TextServer | None:
    """The server of `prometheus` on the primary process, listening. Raises UserError on all if it cannot, and nothing has begun yet.

    A run that has begun before goes on without it, and tries again meanwhile: what took the port must not end it.
    """
    settings = config.prometheus
    if settings is None:
        return None
    server, problem = TextServer(settings.host, settings.port) if phases.primary else None, None
    try:
        if server is not None:
            server.bind()
    except OSError as error:
        rule = f"{settings.host}:{settings.port} cannot be listened at ({error.strerror})"
        if directory.events.is_file():
            warning = f"warning: prometheus.port = {settings.port}: {rule}; the run goes on, and tries again every {BIND_AGAIN_S:g} s"
            phases.console.print(warning, markup=False, highlight=False, soft_wrap=True)
        else:
            problem = ConfigError("prometheus.port", settings.port, rule, "choose another port, or end what uses it")
    require_equal({}, problem)
    return server
