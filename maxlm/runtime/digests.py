"""Short digests of what hosts must have in common."""

import hashlib
from pathlib import Path

import maxlm


def digest(text: str) -> str:
    """Twelve hex digits of `text`'s sha256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def code_digest(folder: Path | None = None) -> str:
    """Of all Python files of maxlm, its kernels included: their names and what is in them."""
    root = folder or Path(maxlm.__file__).parent
    files = sorted({*root.rglob("*.py"), *(root / "kernels").rglob("*.py")})  # that folder may be a link, into which rglob does not go
    return digest("\n".join(f"{file.relative_to(root)} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files))
