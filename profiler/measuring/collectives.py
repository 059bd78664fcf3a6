"""All-reduce and send/recv times on one node, from ranks of
:mod:`sarathi_sim.profiler.measuring.ranks`. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from sarathi_sim.profiler.planning.journal import Timing
from sarathi_sim.profiler.planning.profile_error import ProfileError
from sarathi_sim.profiler.shard.rank_processes import RankProcesses
from sarathi_sim.profiler.storage.files import read_bounded


def message_sizes(largest: int) -> list[int]:
    """1 KiB to at least ``largest`` bytes, two sizes an octave; all multiples of 4."""
    sizes = [2**i * half // 2 for i in range(10, 34) for half in (2, 3)]
    return sizes[: next(i for i, size in enumerate(sizes) if size >= largest) + 1]


def time_collectives(
    ranks: int,
    backend: str,
    dtype: str,
    all_reduce: Sequence[int],
    send_recv: Sequence[int],
    repeats: int = 20,
    timeout_s: float = 60.0,
) -> Iterator[tuple[str, int, Timing]]:
    """Yields (op, num_bytes, timing) as they come, from ``ranks`` processes on this node.

    ``all_reduce`` and ``send_recv`` are message sizes in bytes on each rank; a send goes from rank
    0 to rank 1. Raises ProfileError where a rank fails, or where nothing comes for ``timeout_s``;
    no process is left behind either way.
    """

    def arguments(folder: Path) -> list[str]:
        listed = ["--backend", backend, "--dtype", dtype, "--store", str(folder / "store")]
        listed += ["--world", str(ranks), "--repeats", str(repeats), "--timeout", str(timeout_s)]
        listed += ["--all-reduce", *map(str, all_reduce), "--send-recv", *map(str, send_recv)]
        return listed

    with RankProcesses(
        "sarathi_sim.profiler.measuring.ranks", arguments, ranks, backend
    ) as processes:
        while entry := processes.entry("timing the collectives", timeout_s):
            seconds = entry["time_us"] * 1e-6 * repeats
            timing = Timing(entry["time_us"], entry["spread"], entry["samples"], seconds=seconds)
            yield entry["op"], int(entry["num_bytes"]), timing


def read_inter_node(path: Path) -> dict[int, Timing]:
    """Sends by bytes, from the file that :mod:`sarathi_sim.profiler.measuring.ranks` wrote between
    two nodes.

    Raises ProfileError for a file that is not one.
    """
    found = {}
    lines = read_bounded(path).decode(errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if entry["op"] == "send_recv":
                size, time_us = int(entry["num_bytes"]), float(entry["time_us"])
                spread = float(entry["spread"])
                if size < 0 or not (0 < time_us < math.inf and 0 <= spread < math.inf):
                    raise ValueError
                found[size] = Timing(time_us, spread, int(entry["samples"]))
        except (ValueError, KeyError, TypeError, OverflowError):
            raise ProfileError(
                f"{path}: row {number} is not a line of "
                f"sarathi_sim.profiler.measuring.ranks: {line[:80]!r}"
            ) from None
    if not found:
        raise ProfileError(f"{path}: holds no send_recv")
    return found
