"""These tests run torch on the CPU; without torch they are skipped, and say so."""

from __future__ import annotations

from pathlib import Path

import pytest

try:
    import torch  # noqa: F401

    HAVE_TORCH = True
except ImportError:
    HAVE_TORCH = False

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAVE_TORCH:
        return
    reason = "torch is not installed: pip install 'sarathi-sim[profiler]'"
    for item in items:
        if HERE in item.path.parents and "without_torch" not in item.name:
            item.add_marker(pytest.mark.skip(reason=reason))
