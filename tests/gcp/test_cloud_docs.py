"""Every command of docs/how-to/cloud.md is one that works: dry, against the stand-ins, or by its own help."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import fork_server
from absent_cloud import documented

ROOT = Path(__file__).resolve().parents[2]


def test_every_maxlm_gcp_of_the_page_runs_dry(dry_runs):
    assert {line: err for line, (code, _, err) in dry_runs.items() if code != 0} == {}
    assert all("+ gcloud" in out or "+ kubectl" in out for _, out, _ in dry_runs.values())


def test_every_platform_and_every_verb_is_on_the_page(printed):
    lines = [line for line in documented() if line.startswith("gcp/maxlm-gcp")]
    verbs = re.search(r"^VERBS='(.*)'", (ROOT / "gcp/maxlm-gcp").read_text(encoding="utf-8"), re.MULTILINE)[1].split()
    assert {line.split()[1] for line in lines} == set(verbs) - {"create"}  # `up` is create and more
    made = {" ".join(words[:5]) for words in printed}
    assert {"gcloud compute tpus tpu-vm create", "gcloud compute tpus queued-resources create"} < made
    assert any(words[:4] == ["gcloud", "compute", "instances", "create"] for words in printed)
    assert any(words[:2] == ["kubectl", "apply"] for words in printed)


def test_every_sbatch_of_the_page_names_the_script_and_a_config(cloud):
    lines = [line for line in documented() if line.startswith("sbatch")]
    assert lines
    for line in lines:
        cloud.execute(shlex.split(line))
        options = [word for word in cloud.calls[-1][1:] if word.startswith("--")]
        script, config, *settings = cloud.calls[-1][1 + len(options) :]
        assert (cloud.repository / script).exists()
        assert config.endswith(".yml")
        assert all(re.fullmatch(r"[a-z_]+(\.[a-z_]+)+=\S+", setting) for setting in settings)


def test_every_other_command_of_the_page_is_there():
    """Files that it names exist, the container's build arguments are those of the Dockerfile, and maxlm knows its verbs."""
    others = [shlex.split(line) for line in documented() if not line.startswith(("gcp/", "sbatch"))]
    assert {words[0] for words in others} == {"gcloud", "docker", "maxlm"}
    for words in others:
        for word in words:
            path = word.removeprefix("--file=")
            assert not path.startswith("gcp/") or (ROOT / path).exists(), path
        if words[0] == "maxlm":
            help_ = fork_server.run(
                [sys.executable, "-m", "maxlm", *words[1:3], "--help"], cwd=ROOT, capture_output=True, text=True, check=False
            )
            assert help_.returncode == 0
    (build,) = [words for words in others if words[:2] == ["docker", "build"]]
    arguments = {word.split("=")[0] for word in build if "=" in word}
    assert arguments == set(re.findall(r"^ARG (\w+)", (ROOT / "gcp/Dockerfile").read_text(encoding="utf-8"), re.MULTILINE))


def test_the_example_line_of_watch_is_what_progress_prints(tmp_path):
    """The page shows a line; the program that makes it is run on what would make it."""
    shown = re.search(r"READY \(up\)  (step .*)", (ROOT / "docs/how-to/cloud.md").read_text(encoding="utf-8"))[1]
    start = {"kind": "start", "step": 0, "time": 0, "total_steps": 476837}
    parts = {"compile": 10.0, "step": 490.0}, {"step": 479.0}
    goodput = [
        {"wall_s": sum(seconds.values()), "seconds": seconds, "steps": steps} for seconds, steps in zip(parts, (70, 100), strict=True)
    ]
    events = [
        start,
        {"kind": "stop", "step": 70, "time": 500, "reason": "preempted", "goodput": goodput[0]},
        {**start, "step": 69, "time": 521},
        {"kind": "stop", "step": 169, "time": 1000, "reason": "preempted", "goodput": goodput[1]},
        {**start, "step": 169, "time": 1000},
        {"kind": "stop", "step": 169, "time": 1000, "reason": "done"},
    ]
    latest = {"step": 41300, "loss": 2.417, "tokens_per_s": 1903000, "step_time_s": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(latest))
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, events)))
    command = [sys.executable, ROOT / "gcp/progress.py", tmp_path]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == shown
    marks = {"node7": {"strikes": 2, "reason": "device 3 differs"}, "node8": {"strikes": 1, "reason": "device 9 differs"}}
    (tmp_path / "unhealthy_hosts.json").write_text(json.dumps({"hosts": marks}))
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == f"{shown}  replace host node7"
