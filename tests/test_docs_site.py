"""The messages of docs/troubleshooting.md, and the site of the docs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.test_architecture import MODULES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def test_messages_are_worded_as_in_the_code() -> None:
    rows = re.findall(
        r"^\| (`.+?`) \|", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE
    )
    assert len(rows) > 9
    code = " ".join(path.read_text(encoding="utf-8") for path in MODULES.values())
    code = re.sub(r'"\s*f?"', "", re.sub(r"\s+", " ", code))
    for message in re.findall(r"`(.+?)`", " ".join(rows)):
        for part in re.split(r"'?\.\.\.'?|[(?)]|: ", message):
            assert part.strip() in code, message


def test_the_site_is_built_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (pip install -e '.[dev]')")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    start = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert 'href="workloads.html"' in start
    assert 'src="images/gpt3_pp_timeline.png"' in start
    assert (tmp_path / "site" / "images" / "gpt3_pp_timeline.png").is_file()
    notebook = (tmp_path / "site" / "notebook.html").read_text(encoding="utf-8")
    assert 'src="data:image/png;base64,' in notebook
    shutil.rmtree(tmp_path / "site")
