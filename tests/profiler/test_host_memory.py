"""The memory that limits leave to this process, from files laid out as control groups have them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from sarathi_sim.profiler.storage import child
from sarathi_sim.profiler.storage.child import available_bytes, host_memory

GIB = 2**30


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 GiB, 10 of them free, and the process in the mount's root, as inside a container."""
    found = SimpleNamespace(total=16 * GIB, available=10 * GIB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: found)
    monkeypatch.setattr(child, "MEMBERSHIP", tmp_path / "member")
    monkeypatch.setattr(child, "GROUPS", tmp_path / "mount")
    (tmp_path / "member").write_text("0::/\n")


def group(folder: Path, limit: str, current: int, inactive_file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 123\ninactive_file {inactive_file}\nslab 5\n")


@pytest.mark.parametrize(
    ("limit", "current", "cached", "expected"),
    [
        ("max", 3 * GIB, 0, (16 * GIB, 10 * GIB)),
        (str(8 * GIB), 3 * GIB, 0, (8 * GIB, 5 * GIB)),
        (str(8 * GIB), 3 * GIB, GIB, (8 * GIB, 6 * GIB)),
        (str(8 * GIB), 9 * GIB, 0, (8 * GIB, 0)),
        (str(32 * GIB), 30 * GIB, 0, (16 * GIB, 2 * GIB)),
        (str(32 * GIB), 1 * GIB, 0, (16 * GIB, 10 * GIB)),
    ],
)
def test_a_limit_lowers_what_the_machine_has(
    tmp_path: Path, limit: str, current: int, cached: int, expected: tuple[int, int]
) -> None:
    group(tmp_path / "mount", limit, current, cached)
    assert host_memory() == expected


def test_limits_above_hold_too(tmp_path: Path) -> None:
    (tmp_path / "member").write_text("4:memory:/elsewhere\n0::/slice/service\n")
    group(tmp_path / "mount" / "slice" / "service", str(8 * GIB), GIB)
    group(tmp_path / "mount" / "slice", str(9 * GIB), 6 * GIB)
    group(tmp_path / "mount" / "other", str(GIB), GIB)
    assert host_memory() == (8 * GIB, 3 * GIB)


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    (tmp_path / "member").unlink()
    assert host_memory() == (16 * GIB, 10 * GIB)


def test_version_1_counts_too(tmp_path: Path) -> None:
    (tmp_path / "member").write_text("4:memory:/a/b\n2:cpu:/\n")
    folder = tmp_path / "mount" / "memory" / "a"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("5000\n")
    (folder / "memory.usage_in_bytes").write_text("3000\n")
    (folder / "memory.stat").write_text("anon 1\ntotal_inactive_file 700\n")
    assert available_bytes() == 2700
    (folder / "memory.limit_in_bytes").write_text("max\n")
    assert available_bytes() == 10 * GIB
