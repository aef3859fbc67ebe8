"""Pack the installed maxlm as a wheel in a tar file, for hosts that install the same: `repack.py FILE.tar.gz`.

A wheel is the package's files and its metadata in a zip file (packaging.python.org/specifications/binary-distribution-format): those that
pip has recorded are packed again, without what belongs to this machine (scripts, caches, the origin of the installation).
"""

import importlib.metadata
import io
import sys
import tarfile
import zipfile
from pathlib import Path

OF_THIS_MACHINE = ("INSTALLER", "REQUESTED", "direct_url.json", "RECORD.jws")


def pack(target: Path) -> str:
    """Write the tar file; return the wheel's name. Raises ValueError for an editable installation, whose files pip has not recorded."""
    installed = importlib.metadata.distribution("maxlm")
    files = [file for file in installed.files or () if ".." not in file.parts and "__pycache__" not in file.parts]
    if not any(file.name == "repack.py" for file in files):
        raise ValueError("maxlm is installed here in editable mode: call gcp/maxlm-gcp of the clone, or give --image IMAGE.")
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in files:
            if file.name not in OF_THIS_MACHINE:
                packed.write(str(file.locate()), str(file))
    name = f"maxlm-{installed.version}-py3-none-any.whl"
    with tarfile.open(target, "w:gz") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = wheel.tell()
        wheel.seek(0)
        archive.addfile(entry, wheel)
    return name


if __name__ == "__main__":
    try:
        pack(Path(sys.argv[1]))
    except (ValueError, OSError) as error:
        sys.exit(f"maxlm-gcp: {error}")
