"""Hooks of mkdocs: pages that lie outside of docs/ or are no Markdown, and the links to them."""

from __future__ import annotations

import json
import re
from os.path import relpath
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# A file outside of docs, or a notebook -> its page.
OUTSIDE = {
    "README.md": "overview.md",
    "ARCHITECTURE.md": "ARCHITECTURE.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "data/README.md": "data.md",
    "docs/library.ipynb": "notebook.md",
}
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add these pages."""
    from mkdocs.structure.files import File

    for source, page in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        folder = Path(source).parent
        text = notebook_page(text, folder) if source.endswith(".ipynb") else linked(text, folder)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at the pages."""
    if page.file.src_uri in OUTSIDE.values():
        return markdown
    return linked(markdown, Path("docs"), Path(page.file.src_uri).parent)


def notebook_page(text: str, folder: Path) -> str:
    """A notebook's cells and what they gave, as Markdown."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(linked(source, folder))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![What the cell draws](data:image/png;base64,{data['image/png']})")
            else:
                said = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{said.rstrip()}\n```")
    return "\n\n".join(parts)


def linked(text: str, folder: Path, under: Path = Path()) -> str:
    """The text of a page in ``folder / under``, with links to files as they lie in the site, from
    its folder ``under``."""

    def link(match: re.Match[str]) -> str:
        target = (ROOT / folder / under / match[1]).resolve()
        name = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else match[1]
        found = relpath(OUTSIDE.get(name, name.removeprefix("docs/")), under)
        return f"]({found}{match[2] or ''})"

    return _LINK.sub(link, text)
