"""Writing a single file: it is whole, or as it was."""

from __future__ import annotations

from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Replace ``file`` by one with this text. Raises OSError where that cannot be done."""
    scratch = file.with_name(f".{file.name}.partial")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)
