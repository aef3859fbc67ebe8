"""Where the product's own source is."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path for folder in ("maxlm", "kernels", "tools") for path in (ROOT / folder).rglob("*.py") if path.is_relative_to(path.resolve().parent)
)
