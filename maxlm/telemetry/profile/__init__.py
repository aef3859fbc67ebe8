"""A trace of `jax.profiler`, reduced to one page: where the time of a training step goes, by part of the model."""

from dataclasses import replace
from pathlib import Path

from maxlm.config.errors import error_kind
from maxlm.telemetry.atomic import write_text
from maxlm.telemetry.profile.attribution import Profile, profile_of
from maxlm.telemetry.profile.page import Facts, render
from maxlm.telemetry.profile.viewer_file import write_viewer_file
from maxlm.telemetry.profile.xplane import Trace

PAGE, VIEWER_FILE, TRACE = "profile.html", "trace.json.gz", "trace.xplane.pb"

__all__ = ["PAGE", "TRACE", "VIEWER_FILE", "Facts", "Profile", "reduce_trace"]


def reduce_trace(trace: Path, folder: Path, facts: Facts) -> Profile:
    """Write the page and the viewer's file of a trace (.xplane.pb) to `folder`. Raises UserError for a trace that cannot be read, or a
    folder that cannot be written.
    """
    opened = Trace(trace)
    profile, warned = profile_of(opened), [f"The profiler warns: {warning}" for warning in opened.warnings]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_viewer_file(folder / VIEWER_FILE, profile)
        write_text(folder / PAGE, render(profile, replace(facts, notes=(*facts.notes, *warned))))
    except OSError as error:
        raise error_kind(error)(f"{folder}: the profile cannot be written ({error.strerror or error}); choose another folder.") from error
    return profile
