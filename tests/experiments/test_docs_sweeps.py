"""docs/sweeps.md: what no test can run is Python at least. Its commands: tests/docs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "sweeps.md").read_text(encoding="utf-8")


def test_the_slurm_example_is_python() -> None:
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        compile(block, "docs/sweeps.md", "exec")
