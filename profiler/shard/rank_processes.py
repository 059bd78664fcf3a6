"""Processes of one program, one per rank, on this node: started, watched, ended. No torch.

They are not forks of this process, so this process may use an accelerator. They end when their
standard input closes, so they end with this process in any case.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from sarathi_sim.profiler.planning.profile_error import ProfileError
from sarathi_sim.profiler.storage.paths import PACKAGE

_SCRATCH = "sarathi-sim-ranks-"
LOST_A_PEER = 4
"""Exit code of a rank that fails for want of another one: blamed after all others."""


class RankProcesses:
    """``python -m module *arguments --rank R`` for every rank; use as a context manager.

    ``arguments(folder)`` may name files in a scratch folder that all ranks share. Rank 0 prints
    JSON objects, a line each, which :meth:`line` returns; other lines are a library's (NCCL_DEBUG
    makes some), and are dropped. Whatever happens, no process is left behind.
    """

    def __init__(
        self,
        module: str,
        arguments: Callable[[Path], Sequence[str]],
        ranks: int,
        backend: str,
    ) -> None:
        self.ranks = ranks
        self._module, self._arguments, self._backend = module, arguments, backend
        self.processes: list[subprocess.Popen[bytes]] = []
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def __enter__(self) -> RankProcesses:
        self._scratch = tempfile.TemporaryDirectory(prefix=_SCRATCH)
        self.folder = Path(self._scratch.name)
        command = [sys.executable, "-m", self._module, *self._arguments(self.folder)]
        try:
            for rank in range(self.ranks):
                with self._stderr(rank).open("wb") as errors:
                    self.processes.append(
                        subprocess.Popen(
                            [*command, "--rank", str(rank)],
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                            stderr=errors,
                            env=_environment(self._backend),
                        )
                    )
        except BaseException:
            self._end()
            raise
        output = self.processes[0].stdout
        assert output is not None
        threading.Thread(target=_pump, args=(output, self._lines), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):  # something was still to be written
                        stream.close()
        self._scratch.cleanup()

    def send(self, message: object) -> None:
        """Write one line of JSON to rank 0."""
        stream = self.processes[0].stdin
        assert stream is not None
        try:
            stream.write(json.dumps(message).encode() + b"\n")
            stream.flush()
        except BrokenPipeError:
            self.check()
            raise ProfileError(f"rank 0 is gone; {self._complaint()}") from None

    def line(self, what: str, timeout_s: float) -> bytes:
        """Rank 0's next line; empty once it has closed its output and ended well.

        Raises ProfileError where a rank fails, or where nothing comes for ``timeout_s``; the
        message says that ``what`` is at fault.
        """
        since = time.monotonic()
        while True:
            try:
                line = self._lines.get(timeout=0.1)
            except queue.Empty:
                self.check()
                if time.monotonic() - since > timeout_s:
                    raise ProfileError(
                        f"{what} over {self.ranks} ranks gave no sign of life for "
                        f"{timeout_s:g} s; {self._complaint()}"
                    ) from None
                continue
            if not line:
                try:
                    self.processes[0].wait(timeout=timeout_s)
                except subprocess.TimeoutExpired:
                    raise ProfileError(f"rank 0 does not end; {self._complaint()}") from None
                self.check()
            return line

    def check(self) -> None:
        """Raises ProfileError where a rank has ended badly."""
        codes = {rank: process.poll() for rank, process in enumerate(self.processes)}
        failed = {rank: code for rank, code in codes.items() if code}
        if failed:
            # A rank that was killed comes first, one that lost a peer last.
            rank = min(failed, key=lambda rank: failed[rank])
            how = f"ended with code {failed[rank]}"
            if failed[rank] < 0:
                how = f"was ended by {signal.Signals(-failed[rank]).name}"
            raise ProfileError(f"rank {rank} of {self.ranks} {how}; {self._complaint(rank)}")

    def _stderr(self, rank: int) -> Path:
        return self.folder / f"stderr{rank}"

    def _complaint(self, first: int = 0) -> str:
        """The last line that a rank wrote to stderr, that of ``first`` if it wrote any."""
        for rank in (first, *range(self.ranks)):
            text = self._stderr(rank).read_text(encoding="utf-8", errors="replace").strip()
            if text:
                return f"rank {rank} says: {text.splitlines()[-1][:300]}"
        return "no rank says why"


def end_with_parent(folder: Path, on_line: Callable[[bytes], object] | None = None) -> None:
    """In a rank: exit when standard input closes, which happens when the parent ends in any way.

    ``on_line`` gets the lines before that. The ranks remove the scratch ``folder``, because an
    ended parent cannot.
    """

    def watch() -> None:
        # Not through sys.stdin: a thread that holds its lock would abort the interpreter's exit.
        pending = b""
        while block := os.read(0, 65_536):
            *lines, pending = (pending + block).split(b"\n")
            for line in lines:
                if on_line is not None:
                    on_line(line)
        if folder.name.startswith(_SCRATCH):  # and not a folder that the user named
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()


def _environment(backend: str) -> dict[str, str]:
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    environment["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(PACKAGE.parent), environment.get("PYTHONPATH", "")) if part
    )
    if backend == "gloo" and sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _pump(output: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    for line in output:
        if line.startswith(b"{"):
            lines.put(line)
    lines.put(b"")
