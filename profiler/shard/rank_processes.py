"""Processes of one program, one per rank, on this node: started, watched, ended. No torch.

They are not forks of this process, so this process may use an accelerator. They end when their
channel to it closes, so they end with this process in any case.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ..planning.grid import ProfileError
from ..storage.child import how_it_ended, inbox, start_child

_SCRATCH = "sarathi-sim-ranks-"
LOST_A_PEER = 4
"""Exit code of a rank that fails for want of another one: blamed after all others."""


class RankProcesses:
    """``python -m module PARENT *arguments --rank R`` for every rank; use as a context manager.
    ``arguments(folder)`` may name files in a scratch folder that all ranks share. What a rank sends
    :meth:`entry` returns. Whatever happens, no process is left behind."""

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
        self._channels: list[Connection] = []

    def __enter__(self) -> RankProcesses:
        self._scratch = tempfile.TemporaryDirectory(prefix=_SCRATCH)
        self.folder = Path(self._scratch.name)
        environment = {"OMP_NUM_THREADS": "1"}
        if self._backend == "gloo" and sys.platform == "linux":
            environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        try:
            arguments = self._arguments(self.folder)
            for rank in range(self.ranks):
                with self._stderr(rank).open("wb") as errors:
                    process, channel = start_child(
                        *(self._module, *arguments, "--rank", str(rank)),
                        stderr=errors,
                        environment=environment,
                    )
                self.processes.append(process)
                self._channels.append(channel)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for channel in self._channels:
            channel.close()
        self._scratch.cleanup()

    def send(self, message: object) -> None:
        """Send a message to rank 0."""
        try:
            self._channels[0].send(message)
        except OSError:
            self.check()
            raise ProfileError(f"rank 0 is gone; {self._complaint()}") from None

    def entry(self, what: str, timeout_s: float, rank: int = 0) -> dict[str, Any] | None:
        """The rank's next message; None once it has ended well. Raises ProfileError where a rank
        fails, or where nothing comes for ``timeout_s``; the message says that ``what`` is at
        fault."""
        channel, since = self._channels[rank], time.monotonic()
        while not channel.poll(0.1):
            self.check()
            if time.monotonic() - since > timeout_s:
                raise ProfileError(
                    f"{what} over {self.ranks} ranks gave no answer for "
                    f"{timeout_s:g} s; {self._complaint()}"
                )
        try:
            found: dict[str, Any] = channel.recv()
        except (EOFError, OSError):
            try:
                self.processes[rank].wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise ProfileError(f"rank {rank} does not end; {self._complaint()}") from None
            self.check()
            return None
        return found

    def check(self) -> None:
        """Raises ProfileError where a rank has ended badly."""
        codes = {rank: process.poll() for rank, process in enumerate(self.processes)}
        failed = {rank: code for rank, code in codes.items() if code}
        if failed:
            # A rank that was killed comes first, one that lost a peer last.
            rank = min(failed, key=lambda rank: failed[rank])
            how = how_it_ended(failed[rank])
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


def channel_of_rank(folder: Path) -> tuple[Connection, SimpleQueue[Any]]:
    """In a rank: the channel to its parent, and what this one sends. The rank exits when the
    parent ends in any way, and removes the scratch ``folder``, because an ended parent cannot.
    """
    channel = Connection(os.dup(0))
    ours = folder.name.startswith(_SCRATCH)  # and not a folder that the user named
    return channel, inbox(channel, folder if ours else None)
