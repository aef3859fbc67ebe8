"""Packages of documentation: fetched by name with the ordinary clients, and read member by member without unpacking them to disk."""

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

LARGEST = 64 * 2**20  # bytes of a member; larger ones are data


class Package(NamedTuple):
    """A package file. `kind`: debian, python or npm."""

    kind: str
    name: str
    version: str
    file: Path

    @property
    def url(self) -> str:
        return f"{self.kind}:{self.name}"


@dataclass
class Fetched:
    """Package files in the order of names, and the names that the registry does not serve, with its answer."""

    packages: list[Package]
    missing: dict[str, str]


def fetch(kind: str, names: Sequence[str], folder: Path) -> Fetched:
    """Download packages into `folder`, those that are there already left out."""
    folder.mkdir(parents=True, exist_ok=True)
    command = {"debian": _debian, "python": _python, "npm": _npm}[kind]
    index = folder / "index.json"  # name -> file: how names of files are spelled differs between the clients
    files: dict[str, str] = json.loads(index.read_text()) if index.exists() else {}
    missing: dict[str, str] = {}
    for name in sorted(set(names)):
        if name in files and (folder / files[name]).exists():
            continue
        before = set(folder.iterdir())
        done = subprocess.run(command(name, folder), cwd=folder, capture_output=True, text=True, timeout=600)
        new = sorted(path.name for path in set(folder.iterdir()) - before if path.suffix in (".deb", ".gz", ".tgz", ".zip", ".whl", ".bz2"))
        if done.returncode or not new:
            missing[name] = (done.stderr.strip().splitlines() or ["no file"])[-1][:200]
            print(f"{kind} {name}: {missing[name]}", flush=True)
            continue
        files[name] = new[0]
        index.write_text(json.dumps(files, indent=1, sort_keys=True))
    found = [Package(kind, name, _version(kind, name, files[name]), folder / files[name]) for name in sorted(set(names)) if name in files]
    return Fetched(found, missing)


def _debian(name: str, _: Path) -> list[str]:
    return ["apt-get", "-o", "APT::Sandbox::User=root", "download", name]


def _python(name: str, _: Path) -> list[str]:
    return [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name, name]


def _npm(name: str, _: Path) -> list[str]:
    return ["npm", "pack", "--silent", name]


def _version(kind: str, name: str, file: str) -> str:
    if kind == "debian":
        return file.split("_")[1].replace("%3a", ":")
    return re.sub(r"\.(?:tar\.gz|tar\.bz2|tgz|zip)$", "", file)[len(name) + 1 :]


def members(package: Package) -> Iterator[tuple[str, bytes]]:
    """Path and content of each regular file of a package, links left out, in the order of the archive."""
    if package.kind == "debian":
        with subprocess.Popen(
            ["dpkg-deb", "--fsys-tarfile", str(package.file)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdout is not None
            yield from _tar(process.stdout)
        if process.returncode:
            raise OSError(f"{package.file}: dpkg-deb ended with {process.returncode}")
    elif package.file.suffix in (".zip", ".whl"):
        with zipfile.ZipFile(package.file) as archive:
            for item in archive.infolist():
                if not item.is_dir() and item.file_size <= LARGEST:
                    yield item.filename, archive.read(item)
    else:
        with package.file.open("rb") as file:
            yield from _tar(file, "r|*")


def _tar(stream: IO[bytes], mode: str = "r|") -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=stream, mode=mode) as archive:  # type: ignore[call-overload]
        for member in archive:
            if member.isfile() and member.size <= LARGEST:
                content = archive.extractfile(member)
                yield member.name.removeprefix("./"), content.read() if content else b""
