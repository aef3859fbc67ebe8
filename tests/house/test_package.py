"""What `pip install` brings: every file of configs, gcp, kernels and slurm, in the wheel and in the source distribution, and a licence."""

import fnmatch
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from source_files import ROOT

from maxlm import __version__

LINKS = ("configs", "gcp", "kernels", "slurm")  # folders of the repository that are links in the package
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SCRIPTS = ("gcp/maxlm-gcp", "gcp/host.sh")


def repository_files() -> list[str]:
    """Files of git; of a tree without git, all."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0:
        return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
    return [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file() and not {".venv", ".git"} & set(path.parts)]


def packaged() -> list[str]:
    """Paths that the installed package has, below `maxlm/`."""
    own = [name.removeprefix("maxlm/") for name in repository_files() if name.startswith("maxlm/") and (ROOT / name).is_file()]
    return sorted([*own, *(name for name in repository_files() if name.startswith(tuple(f"{link}/" for link in LINKS)))])


def is_declared(name: str) -> bool:
    """True if setuptools packs this file of the package: a module, or one that a pattern of package-data matches."""
    if name.endswith(".py"):
        return True
    for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items():
        folder = f"{package}.".removeprefix("maxlm.").replace(".", "/")
        inside = name.removeprefix(folder) if name.startswith(folder) else None
        if inside is not None and any(inside.count("/") == p.count("/") and fnmatch.fnmatch(inside, p) for p in patterns):
            return True
    return False


def test_every_file_of_the_package_is_declared():
    assert all((ROOT / "maxlm" / link).resolve() == ROOT / link for link in LINKS)
    assert {"configs/runs/quickstart.yml", "configs/tasks/prose.jsonl", "gcp/iam/host.yaml", "slurm/train.sbatch"} < set(packaged())
    assert [name for name in packaged() if not is_declared(name)] == []
    assert not is_declared("telemetry/new.json")


def test_the_licence_is_apache_2_and_is_named():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    assert (PROJECT["project"]["license"], PROJECT["project"]["license-files"]) == ("Apache-2.0", ["LICENSE"])


def test_the_changelog_has_this_version():
    assert f"## [{__version__.removesuffix('.dev0')}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert PROJECT["project"]["version"] == __version__


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the files of git."""
    folder = tmp_path_factory.mktemp("source")
    for name in repository_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False) if not (ROOT / name).is_symlink() else (folder / name).symlink_to(
            (ROOT / name).readlink()
        )
    return folder


def build_wheel(source: Path, folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
        ".",
    ]
    subprocess.run(command, cwd=source, check=True, env={**os.environ, "PYTHONPATH": ""})
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    code = f"import setuptools.build_meta as backend; print(backend.build_sdist({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (file,) = folder.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        archive.extractall(folder, filter="data")
    return folder / file.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module", params=["source", "sdist"])
def wheel(request, tmp_path_factory) -> Path:
    """A wheel, built from the repository's files or from the source distribution."""
    return build_wheel(request.getfixturevalue(request.param), tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The `bin` of an environment that has this wheel, and all other packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    command = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run(command, check=True)
    return folder / "bin"


def maxlm(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([installed / "maxlm", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.soak
def test_the_wheel_has_every_file_and_the_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        modes = {name: archive.getinfo(name).external_attr >> 16 for name in names}
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith("/METADATA")]
    assert sorted(name.removeprefix("maxlm/") for name in names if name.startswith("maxlm/")) == packaged()
    assert all(modes[f"maxlm/{script}"] & 0o111 for script in SCRIPTS)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata


@pytest.mark.soak
def test_an_installed_package_has_its_configs_and_scripts_in_an_empty_folder(installed, tmp_path):
    """With the commands of the README; the model is the smallest that trains."""
    place = maxlm(installed, tmp_path, "path").stdout.strip()
    assert Path(place).is_relative_to(installed.parent), "another maxlm was imported"
    assert "8,030,261,248" in maxlm(installed, tmp_path, "config", "models/llama3-8b").stdout
    script = Path(maxlm(installed, tmp_path, "path", "gcp/maxlm-gcp").stdout.strip())
    assert os.access(script, os.X_OK)
    environment = {**os.environ, "PYTHONPATH": "", "PATH": f"{installed}:{os.environ['PATH']}"}
    words = [script, "create", "runs/llama3-8b-v5p-128", "--bucket", "gs://mine", "--zone", "z", "--dry-run"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--accelerator-type=v5p-128" in done.stdout
    assert Path(maxlm(installed, tmp_path, "path", "slurm/train.sbatch").stdout.strip()).is_file()
    small = ["model.n_layers=1", "model.d_model=32", "model.d_ff=32", "data.seq_len=64", "train.steps=2", "samples=null"]
    small += [
        "data.prepare.sources=[texts]",
        "model.vocab_size=512",
        "data.prepare.tokenizer.vocab_size=512",
        "train.eval_batches=0",
        "train.eval_every=null",
    ]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("def f(x):\n    return x\n" * 2000)
    assert "report" in maxlm(installed, tmp_path, "train", "runs/quickstart", *small).stdout
    assert (tmp_path / "runs/quickstart/report.html").is_file()


@pytest.mark.soak
def test_hosts_of_the_cloud_get_the_package_that_is_installed_here(installed, tmp_path):
    """What `maxlm-gcp` uploads is a wheel that pip installs."""
    script = maxlm(installed, tmp_path, "path", "gcp/repack.py").stdout.strip()
    environment = {**os.environ, "PYTHONPATH": ""}
    subprocess.run([installed / "python", script, tmp_path / "code.tar.gz"], check=True, env=environment)
    with tarfile.open(tmp_path / "code.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", tmp_path / "host"]
    subprocess.run([*command, *tmp_path.glob("*.whl")], check=True)
    found = [path.relative_to(tmp_path / "host/maxlm").as_posix() for path in (tmp_path / "host/maxlm").rglob("*") if path.suffix != ".pyc"]
    assert sorted(name for name in found if (tmp_path / "host/maxlm" / name).is_file()) == packaged()
