"""The memory that a container's limits leave, from files laid out as cgroup v2 has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler.storage.container import memory_within_limits

GIB = 2**30


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
    own = tmp_path / "own"
    own.write_text("0::/\n")  # as inside a container, whose group is the mount's root
    group(tmp_path / "mount", limit, current, cached)
    assert memory_within_limits(16 * GIB, 10 * GIB, tmp_path / "mount", own) == expected


def test_limits_above_hold_too(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/elsewhere\n0::/slice/service\n")
    group(tmp_path / "mount" / "slice" / "service", str(8 * GIB), GIB)
    group(tmp_path / "mount" / "slice", str(9 * GIB), 6 * GIB)
    group(tmp_path / "mount" / "other", str(GIB), GIB)
    assert memory_within_limits(16 * GIB, 10 * GIB, tmp_path / "mount", own) == (8 * GIB, 3 * GIB)


def test_without_cgroups_the_machine_counts(tmp_path: Path) -> None:
    assert memory_within_limits(7, 5, tmp_path / "none", tmp_path / "nothing") == (7, 5)
