"""Views of a run that is too large to keep all of them: one replica at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sarathi_sim.simulator.loop.records import Records, ReplicaLog

T = TypeVar("T")
MOST_KEPT = 4_000_000
"""Stage executions up to which the views of a run are kept: they take some 60 bytes each."""


class PerReplica(Sequence[T]):
    """A value computed for each replica's log at its first use, and kept unless it is large.

    For a million requests the gaps of all replicas would take more memory than the records. Then
    they are computed for one replica at a time, more than once.
    """

    def __init__(self, records: Records, work_out: Callable[[ReplicaLog], T]) -> None:
        self._logs = records.replicas
        self._work_out = work_out
        self._keep = sum(log.num_iterations * log.num_stages for log in self._logs) <= MOST_KEPT
        self._kept: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._logs)

    def __getitem__(self, replica: Any) -> Any:
        if replica >= len(self._logs):
            raise IndexError(replica)
        if replica in self._kept:
            return self._kept[replica]
        found = self._work_out(self._logs[replica])
        if self._keep:
            self._kept[replica] = found
        return found
