"""The roles in gcp/iam name every command that the scripts run, and none that they do not; gcloud's own parser takes every one of them."""

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from ruamel.yaml import YAML

GCP = Path(__file__).resolve().parents[2] / "gcp"


def named(path):
    """Commands that the comments of a role name."""
    comments = re.findall(r"^  # (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {match for comment in comments for match in re.findall(r"(?:gcloud|kubectl)(?: [a-z-]+)+", comment)}


def test_the_role_of_a_person_is_that_of_the_commands(printed):
    verbs = "create|describe|list|delete|ssh|cp|cat|rsync|apply|get|patch|logs"
    used = {re.match(rf"(?:[a-z-]+ )+?(?:{verbs})(?= )", " ".join(words))[0] for words in printed}
    assert named(GCP / "iam/person.yaml") == used


def test_the_role_of_a_host_is_that_of_its_script():
    text = (GCP / "host.sh").read_text(encoding="utf-8")
    used = set(re.findall(r"gcloud (?:storage|secrets)(?: (?:versions|access|cp|ls|rsync|cat))+", text))
    assert named(GCP / "iam/host.yaml") == used


@pytest.mark.parametrize("path", sorted((GCP / "iam").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_role_is_a_list_of_single_permissions(path):
    role = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    assert set(role) == {"title", "stage", "includedPermissions"}
    permissions = role["includedPermissions"]
    assert len(set(permissions)) == len(permissions)
    assert all(re.fullmatch(r"[a-z]+\.[a-zA-Z]+\.[a-zA-Z]+", permission) for permission in permissions)


@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed: its parser cannot be asked")
@pytest.mark.soak
def test_gclouds_own_parser_takes_every_command(printed, tmp_path):
    """`gcloud meta lint-gcloud-commands` knows every command and flag, and calls nobody."""
    distinct = {
        re.sub(re.escape(tempfile.gettempdir()) + r"/[^/]+/", f"{tmp_path}/", shlex.join(words))
        for words in printed
        if words[0] == "gcloud"
    }
    shapes = {re.sub(r"=\S+|gs://\S+|maxlm-\S+", "", command): command for command in sorted(distinct)}
    for name in ("startup.sh", "config.yml", "code.tar.gz", "cluster-secret"):
        (tmp_path / name).touch()
    listed = tmp_path / "commands.json"
    wrong = "gcloud compute tpus tpu-vm create x --zone=z --no-such-flag"  # that the parser looks at all
    listed.write_text(json.dumps([{"command_string": command} for command in [*shapes.values(), wrong]]))
    environment = {**os.environ, "CLOUDSDK_CONFIG": str(tmp_path / "config"), "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
                   "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1"}  # fmt: skip
    done = subprocess.run(
        ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={listed}"], env=environment, capture_output=True, text=True, check=True
    )
    results = json.loads(done.stdout)
    problems = {result["command_string"]: result.get("error_message") for result in results if not result["success"]}
    assert list(problems) == [wrong], problems
    assert len(results) == len(shapes) + 1 > 12
