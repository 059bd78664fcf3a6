"""All-reduce and send/recv times on one node: starts the ranks, reads them, ends them. torch-free.

The ranks are processes of :mod:`profiler.ranks` and not forks of this one, so that an accelerator
that is in use here is no hindrance. They end when their standard input closes, hence with us.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from profiler.journal import Timing
from profiler.profile_error import ProfileError


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
    with tempfile.TemporaryDirectory(prefix="sarathi-sim-ranks-") as folder:
        command = [sys.executable, "-m", "profiler.ranks", "--backend", backend, "--dtype", dtype]
        command += ["--store", str(Path(folder) / "store"), "--world", str(ranks)]
        command += ["--repeats", str(repeats), "--timeout", str(timeout_s)]
        command += ["--all-reduce", *map(str, all_reduce), "--send-recv", *map(str, send_recv)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                with (Path(folder) / f"stderr{rank}").open("wb") as errors:
                    processes.append(
                        subprocess.Popen(
                            [*command, "--rank", str(rank)],
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                            stderr=errors,
                            env=_environment(backend),
                        )
                    )
            for line in _lines(processes, Path(folder), timeout_s):
                began = time.perf_counter()
                entry = json.loads(line)
                seconds = entry["time_us"] * 1e-6 * repeats + (time.perf_counter() - began)
                timing = Timing(
                    entry["time_us"], entry["spread"], entry["samples"], seconds=seconds
                )
                yield entry["op"], int(entry["num_bytes"]), timing
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
                for stream in (process.stdin, process.stdout):
                    if stream is not None:
                        stream.close()


def _environment(backend: str) -> dict[str, str]:
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    root = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(
        part for part in (root, environment.get("PYTHONPATH", "")) if part
    )
    if backend == "gloo" and sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _lines(
    processes: list[subprocess.Popen[bytes]], folder: Path, timeout_s: float
) -> Iterator[bytes]:
    """Rank 0's lines until it closes its output. Raises ProfileError as time_collectives says."""
    output = processes[0].stdout
    assert output is not None
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_pump, args=(output, lines), daemon=True).start()
    quiet_since = time.monotonic()
    while True:
        try:
            line = lines.get(timeout=0.2)
        except queue.Empty:
            _check(processes, folder)
            if time.monotonic() - quiet_since > timeout_s:
                raise ProfileError(
                    f"the collectives over {len(processes)} ranks gave no time for "
                    f"{timeout_s:g} s; {_complaint(folder, len(processes))}"
                ) from None
            continue
        if not line:
            processes[0].wait(timeout=timeout_s)
            _check(processes, folder)
            return
        quiet_since = time.monotonic()
        yield line


def _pump(output: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    for line in output:
        lines.put(line)
    lines.put(b"")


def _check(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    for rank, process in enumerate(processes):
        code = process.poll()
        if code:
            raise ProfileError(
                f"rank {rank} of {len(processes)} ended with code {code}; "
                f"{_complaint(folder, len(processes))}"
            )


def _complaint(folder: Path, ranks: int) -> str:
    """The last line that a rank wrote to stderr."""
    for rank in range(ranks):
        text = (folder / f"stderr{rank}").read_text(encoding="utf-8", errors="replace").strip()
        if text:
            return f"rank {rank} says: {text.splitlines()[-1][:300]}"
    return "no rank says why"


def read_inter_node(path: Path) -> dict[int, float]:
    """Microseconds by bytes, from the file that :mod:`profiler.ranks` wrote between two nodes.

    Raises ProfileError for a file that is not one.
    """
    times = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            if entry["op"] == "send_recv":
                times[int(entry["num_bytes"])] = float(entry["time_us"])
        except (ValueError, KeyError, TypeError):
            raise ProfileError(
                f"{path}: row {number} is not a line of profiler.ranks: {line[:80]!r}"
            ) from None
    if not times:
        raise ProfileError(f"{path}: holds no send_recv")
    return times
