"""`maxlm profile`, and `run.profile` in a run as a user starts it."""

import gzip
import hashlib
import json
from types import SimpleNamespace

import fork_server
import jax
import numpy as np
import pytest
from small_run import command, environment, events, finish, make_workspace, start

from maxlm.diagnostics import profile_command
from maxlm.telemetry.profile import TRACE


def profile(folder, *arguments, code=0):
    answer = fork_server.run(
        command("profile", *arguments), cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert answer.returncode == code, answer.stdout + answer.stderr
    return answer.stdout + answer.stderr


def digests(folder):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.soak
def test_a_run_is_profiled_while_it_runs_and_afterwards(tmp_path):
    """Both pages attribute 95% of the time. A profile afterwards changes nothing but its own folder, and the run is that without one."""
    folder = make_workspace(tmp_path)
    finish(start(folder, "run.name=plain"))
    finish(start(folder, "run.profile={at: [12], steps: 2}"))
    run = folder / "runs" / "small"
    (event,) = events(folder, "profile")
    assert (event["step"], event["page"]) == (12, "runs/small/profile/12/profile.html")
    assert event["attributed"] > 0.95
    losses = [[json.loads(line)["loss"] for line in (run.parent / name / "metrics.jsonl").open()] for name in ("plain", "small")]
    assert losses[0] == losses[1]
    before = digests(run)
    said = profile(folder, "runs/small", "--steps", "2")
    assert "runs/small/profile/20/profile.html: 2 steps from step 20" in said
    once = digests(run)
    assert {path: digest for path, digest in once.items() if "profile/20" not in str(path)} == before
    assert "runs/small/profile/20-2/profile.html" in profile(folder, "runs/small", "--steps", "1")
    assert digests(run).items() >= once.items()
    for step in (12, 20):
        made = run / "profile" / str(step)
        assert sorted(path.name for path in made.iterdir()) == ["profile.html", "trace.json.gz", "trace.xplane.pb"]
        page = (made / "profile.html").read_text()
        for part in ("attention", "feed-forward", "norms", "unembedding and loss", "optimizer", "data wait"):
            assert part in page
        assert json.loads(gzip.decompress((made / "trace.json.gz").read_bytes()))["traceEvents"]


def test_a_step_is_waited_for_while_the_next_one_runs(tmp_path, monkeypatch):
    """As in training: if every step were waited for, the page would show idle devices that a run does not have."""
    calls, number = [], iter(range(10))

    def step(state, batch):
        calls.append(("step", update := next(number)))
        return state, update

    monkeypatch.setattr(profile_command, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(profile_command, "stop_trace", lambda folder: calls.append("stop"))
    monkeypatch.setattr(jax, "block_until_ready", lambda value: calls.append(("wait", value)))
    program = SimpleNamespace(mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",)), step=step)
    profile_command._record(program, SimpleNamespace(state="state"), SimpleNamespace(get=lambda: None), 3, tmp_path)
    traced = calls[calls.index("start") + 1 :]
    assert traced == [("step", 2), ("wait", None), ("step", 3), ("wait", 2), ("step", 4), ("wait", 3), ("wait", "state"), "stop"]


def test_no_trace_is_overwritten(tmp_path):
    """Neither that of a running job, of whichever of its processes, nor one of an earlier command."""
    for folder, trace in (("20", "20"), ("20-2", "20-2/process-1"), ("20-3", "20-3")):
        assert profile_command._unused_folder(tmp_path, 20) == tmp_path / folder
        (tmp_path / trace).mkdir(parents=True)
        assert profile_command._unused_folder(tmp_path, 20) == tmp_path / folder, "a folder without a trace is free"
        (tmp_path / trace / TRACE).touch()
    assert profile_command._unused_folder(tmp_path, 21) == tmp_path / "21"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing",), "nothing is not a run directory: it has no config.yml"),
        (("nothing", "--steps", "0"), "Invalid value for '--steps'"),
        (("nothing", "mesh.fsdp=2"), "mesh.fsdp=2: a run is profiled as it is configured"),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, said):
    answer = profile(tmp_path, *arguments, code=2)
    assert said in answer
    assert answer.startswith("maxlm: ")
    assert len(answer.strip().splitlines()) == 1
    assert not (tmp_path / "nothing").exists()
