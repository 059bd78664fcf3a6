"""Hooks of mkdocs: pages that lie outside of docs/, and the links to and from them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# A file outside of docs -> its page.
OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "ARCHITECTURE.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "data/README.md": "data.md",
}
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside."""
    from mkdocs.structure.files import File

    for source, page in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=linked(text, Path(source).parent)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at the pages."""
    if page.file.src_uri in OUTSIDE.values():
        return markdown
    return linked(markdown, Path("docs"))


def linked(text: str, folder: Path) -> str:
    """The text of a page in ``folder``, with links to files as they lie in the site."""

    def link(match: re.Match[str]) -> str:
        target = (ROOT / folder / match[1]).resolve()
        name = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else match[1]
        return f"]({OUTSIDE.get(name, name.removeprefix('docs/'))}{match[2] or ''})"

    return _LINK.sub(link, text)
